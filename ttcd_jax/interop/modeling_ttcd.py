"""Transformers whose MLPs write into their own down projections while they read (IP-TTCD, IP-TTT).

Exported checkpoints have a copy of this file, which needs torch and transformers alone:

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The memory is in `past_key_values`, so that `generate` keeps it. The rows of a batch have the same
length: padding would be written into the memory.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

_QUERIES = 1024  # that attend at once


class TTCDConfig(PretrainedConfig):
    """`model`: the model's configuration in ttcd_jax. `rotary`: radians per position of each pair
    of a head, and the factor on cos and sin."""

    model_type = "ttcd"

    def __init__(self, model: Any = None, rotary: Any = None, **kwargs: Any) -> None:
        self.model, self.rotary = model or {}, rotary or {}
        super().__init__(**kwargs)


class TTCDCache(DynamicCache):
    """Keys and values, and of every layer with a memory the sum [B, F, D] that full chunks wrote
    and the inputs [B, n, ...] of the n tokens after them."""

    def __init__(self, config: TTCDConfig) -> None:
        super().__init__(config=config)
        self.sums: dict[int, Tensor] = {}
        self.open: dict[int, list[Tensor]] = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        self.sums = {layer: x[beam_idx] for layer, x in self.sums.items()}
        self.open = {layer: [x[beam_idx] for x in inputs] for layer, inputs in self.open.items()}

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a memory cannot take tokens back: generate without an assistant")


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (unit * self.weight.float()).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Queries [B, N, T, H] and keys [B, K, S, H] that end together; a window counts the query."""
    before, results = k.shape[2] - q.shape[2], []
    for start in range(0, q.shape[2], _QUERIES):
        part = q[:, :, start : start + _QUERIES]
        first = before + start
        stop, begin = first + part.shape[2], 0 if window is None else max(first + 1 - window, 0)
        query = torch.arange(first, stop, device=q.device)[:, None]
        key = torch.arange(begin, stop, device=q.device)
        mask = key <= query if window is None else (key <= query) & (key > query - window)
        seen = k[:, :, begin:stop], v[:, :, begin:stop]
        results.append(F.scaled_dot_product_attention(part, *seen, attn_mask=mask, enable_gqa=True))
    return torch.cat(results, 2).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """One projection of queries, keys and values; a result for each window."""

    def __init__(self, config: TTCDConfig, windows: list[int | None]) -> None:
        super().__init__()
        c, size, groups = config.model, config.head_dim, config.num_key_value_heads
        self.size, self.windows, self.has_norm = size, windows, c["has_qk_norm"]
        counts = {"q": config.num_attention_heads, "k": groups, "v": groups}
        for name, count in counts.items():
            project = nn.Linear(c["dim"], count * size, bias=c["has_qkv_bias"])
            self.add_module(f"{name}_proj", project)
            if self.has_norm and name != "v":
                self.add_module(f"{name}_norm", RMSNorm(size, c["qk_norm_eps"]))
        self.o_proj = nn.Linear(counts["q"] * size, c["dim"], bias=False)

    def _heads(self, name: str, h: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        x = getattr(self, f"{name}_proj")(h).unflatten(-1, (-1, self.size)).transpose(1, 2)
        if turn is None:
            return x
        x = getattr(self, f"{name}_norm")(x) if self.has_norm else x
        first, second = x.float().chunk(2, -1)
        cos, sin = turn
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    def forward(self, h: Tensor, turn: Any, cache: TTCDCache, layer: int) -> list[Tensor]:
        q = self._heads("q", h, turn)
        k, v = cache.update(self._heads("k", h, turn), self._heads("v", h, None), layer)
        return [self.o_proj(attend(q, k, v, window)) for window in self.windows]


class Taps(nn.Module):
    """A depthwise convolution inside a chunk."""

    def __init__(self, channels: int, taps: int, is_causal: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, taps))
        left = taps - 1 if is_causal else taps // 2
        self.pad = (left, taps - 1 - left)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.mT, self.pad)
        return F.conv1d(padded, self.weight.to(x.dtype), groups=len(self.weight)).mT


class MLP(nn.Module):
    """SwiGLU, without or with a memory (`settings`) in its down projection."""

    def __init__(self, c: dict[str, Any], settings: dict[str, Any] | None) -> None:
        super().__init__()
        D, H, self.settings = c["dim"], c["mlp_dim"], settings
        for name, shape in {"gate": (D, H), "up": (D, H), "down": (H, D)}.items():
            self.add_module(f"{name}_proj", nn.Linear(*shape, bias=False))
        if settings is None:
            return
        is_distilling = "has_student_conv" in settings
        convs = {"teacher": H, "student": H} if is_distilling else {"target": D, "activation": H}
        for name, width in convs.items():
            if settings[f"has_{name}_conv"]:
                own = f"ttt_{name}_conv".replace("_target", "")
                taps = Taps(width, settings["num_taps"], settings["is_conv_causal"])
                self.add_module(own, taps)
        if settings["has_proj"]:
            self.ttt_proj = nn.Linear(D, D, bias=False)
        if is_distilling and settings["has_token_rate"]:
            self.b_proj = nn.Parameter(torch.zeros(D))
        if settings["decay"] != "constant":
            self.ttt_decay = nn.Parameter(torch.zeros(len(settings["half_lives"])))
        if settings["decay"] == "gated":
            self.ttt_decay_gate = nn.Linear(D, len(settings["half_lives"]), bias=False)

    def features(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor, t: Tensor, cache: TTCDCache, layer: int) -> Tensor:
        """y [B, T, D]; `t`: the student, or the targets."""
        if self.settings is None:
            return self.down_proj(self.features(x))
        size, results = self.settings["chunk_size"], []
        inputs = self._inputs(x, t)
        opened = cache.open.get(layer, [part[:, :0] for part in inputs])
        total = cache.sums.get(layer)
        if total is None:
            total = torch.zeros(len(x), *self.down_proj.weight.mT.shape, device=x.device)
        while (left := inputs[0].shape[1]) > 0:
            count = min(left, size - opened[0].shape[1])
            opened = [torch.cat([a, b[:, :count]], 1) for a, b in zip(opened, inputs, strict=True)]
            inputs = [part[:, count:] for part in inputs]
            z = self._reads(opened, count)
            remembered = z.float() @ total.to(x.dtype).float()
            results.append(self.down_proj(z) + (self.settings["eta"] * remembered).to(x.dtype))
            if opened[0].shape[1] == size:
                total = self._written(total, opened)
                opened = [part[:, :0] for part in opened]
        cache.open[layer], cache.sums[layer] = opened, total
        return torch.cat(results, 1)

    def _inputs(self, x: Tensor, t: Tensor) -> list[Tensor]:
        """Of every token: features, the student's or the target, rate, logarithm of the decay."""
        settings, features = self.settings, self.features(x)
        rate = features.new_ones(*x.shape[:2], 1)
        if "has_student_conv" in settings:
            rate = torch.sigmoid(t @ self.b_proj)[..., None] if hasattr(self, "b_proj") else rate
            t = self.features(t)
        decay = -math.log(2) / torch.tensor(settings["half_lives"] or [math.inf], device=x.device)
        if settings["decay"] != "constant":
            decay = decay * self.ttt_decay.float().exp()
        decay = decay.expand(*x.shape[:2], -1)
        if settings["decay"] == "gated":
            decay = decay * F.softplus(self.ttt_decay_gate(x).float()) / math.log(2)
        return [features, t, rate, decay]

    def _convolved(self, name: str, x: Tensor) -> Tensor:
        taps = getattr(self, f"ttt_{name}", None)
        return x if taps is None else taps(x)

    def _reads(self, opened: list[Tensor], count: int) -> Tensor:
        """Features of the last `count` tokens, by which the memory is read."""
        output = self.settings.get("output", "activation")
        if output == "teacher_raw":
            return opened[0][:, -count:]
        part = opened[output == "student"][:, 1 - count - self.settings["num_taps"] :]
        return self._convolved(f"{output}_conv", part)[:, -count:]

    def _written(self, total: Tensor, opened: list[Tensor]) -> Tensor:
        """The sum after a whole chunk."""
        settings, (features, t, rate, decay) = self.settings, opened
        if "has_student_conv" in settings:
            keys = self._convolved("student_conv", t)
            errors = self.down_proj(self._convolved("teacher_conv", features) - keys)
            if settings["normalizes_errors"]:
                errors = unit(errors)
            errors = errors * rate
        else:
            keys, errors = self._convolved("activation_conv", features), self._convolved("conv", t)
        if settings["has_proj"]:
            errors = errors @ self.ttt_proj.weight
        if settings.get("normalizes_keys", settings["corrects_errors"]):
            keys = unit(keys)
        kept = decay.sum(1).exp().repeat_interleave(total.shape[2] // decay.shape[2], 1)
        total, keys, errors, dtype = total * kept[:, None], keys.float(), errors.float(), keys.dtype
        if settings["corrects_errors"]:
            rate, size = rate.float(), keys.shape[1]
            overlap = torch.eye(size, device=keys.device) + (rate * (keys @ keys.mT)).tril(-1)
            sides = errors - rate * (keys @ total.to(dtype).float())
            errors = torch.linalg.solve_triangular(overlap, sides, upper=False).to(dtype).float()
        return total + keys.mT @ errors


def unit(x: Tensor) -> Tensor:
    return (x.float() / x.float().norm(dim=-1, keepdim=True).clamp_min(1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, config: TTCDConfig, layer: int) -> None:
        super().__init__()
        c, eps = config.model, config.model["norm_eps"]
        is_fast, self.layer = layer in c["fast_layers"], layer
        has_student = is_fast and "has_student_conv" in c["memory"]
        windows = [c["window"], *([c["student_window"]] if has_student else [])]
        self.input_layernorm = RMSNorm(c["dim"], eps)
        self.self_attn = Attention(config, windows)
        self.post_attention_layernorm = RMSNorm(c["dim"], eps)
        self.mlp = MLP(c, c["memory"] if is_fast else None)
        self.stores_embeddings = is_fast and c["memory"].get("target") == "embedding"

    def forward(self, h: Tensor, embedded: Tensor, turn: Any, cache: TTCDCache) -> Tensor:
        seen = self.self_attn(self.input_layernorm(h), turn, cache, self.layer)
        x, t = (self.post_attention_layernorm(h + seen[i]) for i in (0, -1))
        t = embedded if self.stores_embeddings else t
        return h + seen[0] + self.mlp(x, t, cache, self.layer)


class TTCDModel(nn.Module):
    def __init__(self, config: TTCDConfig) -> None:
        super().__init__()
        c = config.model
        self.embed_tokens = nn.Embedding(config.vocab_size, c["dim"])
        self.layers = nn.ModuleList(Block(config, i) for i in range(c["num_layers"]))
        self.norm = RMSNorm(c["dim"], c["norm_eps"])


class TTCDForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TTCDConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012

    def __init__(self, config: TTCDConfig) -> None:
        super().__init__(config)
        self.model = TTCDModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is None:
            kwargs["past_key_values"] = TTCDCache(self.config)
        return super().generate(*args, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: TTCDCache | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        if attention_mask is not None and not attention_mask.all():
            raise ValueError(
                "attention_mask has padding, which the memory would store: pass rows "
                "of one length, or one row at a time"
            )
        cache = TTCDCache(self.config) if past_key_values is None else past_key_values
        h = embedded = self.model.embed_tokens(input_ids)
        start, rotary = cache.get_seq_length(), self.config.rotary
        positions = torch.arange(start, start + h.shape[1], device=h.device, dtype=torch.float32)
        angle = positions[:, None] * torch.tensor(rotary["frequencies"], device=h.device)
        turn = rotary["magnitude"] * angle.cos(), rotary["magnitude"] * angle.sin()
        for layer in self.model.layers:
            h = layer(h, embedded, turn, cache)
        logits = self.lm_head(self.model.norm(h[:, -logits_to_keep:]))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
