"""Transformers whose MLPs write into their own down projections while they read (IP-TTCD, IP-TTT).

Exported checkpoints have a copy of this file, which needs torch and transformers alone:

    model = AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)

The memory is in the cache, so that `generate` keeps it. Rows of a batch that begin at the same
column are computed together, as if they were alone: padding is neither read nor written.
"""

import inspect
import math
import re
import warnings
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

TRIED = ("4.46.1", "4.57.6", "5.0.0", "5.3.0", "5.24.0")  # of transformers
_CACHE = next(x for x in ("cache", "past_key_values") if hasattr(CausalLMOutputWithPast, x))
_QUERIES = 1024  # that attend at once
_State = list[Tensor]  # what later tokens need of a layer

_versions = (TRIED[0], transformers.__version__, TRIED[-1])
_oldest, _found, _newest = ([int(x) for x in re.findall(r"\d+", y)[:3]] for y in _versions)
if not _oldest <= _found <= _newest:
    _text = f"modeling_ttcd.py was tried with transformers {', '.join(TRIED)}, not {_versions[1]}"
    if _found < _oldest:
        raise ImportError(_text)
    warnings.warn(_text, stacklevel=2)


def given(value: Any, default: Any) -> Any:
    return default if value is None else value


def require(holds: bool, message: str) -> None:
    if not holds:
        raise ValueError(message)


class TTCDConfig(PretrainedConfig):
    """`model`: the model's configuration in ttcd_jax. `rotary`: radians per position of each pair
    of a head, and the factor on cos and sin."""

    model_type = "ttcd"
    keys_to_ignore_at_inference = [_CACHE]  # noqa: RUF012

    def __init__(self, model: Any = None, rotary: Any = None, **kwargs: Any) -> None:
        self.model, self.rotary = model or {}, rotary or {}
        self.use_cache = kwargs.pop("use_cache", True)
        super().__init__(**kwargs)


class TTCDCache(DynamicCache):
    """`groups`: by the number of columns before the first token the rows that begin there, of
    every layer keys and values, and where it has a memory the sum [B, F, D] that full chunks wrote
    and the inputs [B, n, ...] of the n tokens after them. `starts`: that number for every row."""

    is_linear, is_croppable = (False,), False

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self) -> None:
        self.groups: dict[int, list[_State]] = {}
        self.starts: list[int] = []
        self.length = 0

    def __len__(self) -> int:
        return len(next(iter(self.groups.values()), ()))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def batch_select_indices(self, indices: Tensor) -> None:
        rows, starts = indices.tolist(), self.starts
        for start, layers in self.groups.items():
            group = [row for row, other in enumerate(starts) if other == start]
            places = [group.index(row) for row in rows if starts[row] == start]
            self.groups[start] = [[x[places] for x in layer] for layer in layers]
        self.starts = [starts[row] for row in rows]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.starts)).repeat_interleave(repeats))

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("a memory takes no tokens back and has no other form: pass this cache on")

    crop = update = to_legacy_cache = from_legacy_cache = _refuse


def rows_of(
    embedded: Tensor, mask: Tensor | None, positions: Tensor | None, cache: TTCDCache
) -> tuple[list[tuple[int, int]], Tensor]:
    """Of every row the column of its first token and the one after its last, and which of the new
    columns [B, T] have a token. Refuses what contradicts the cache."""
    require(embedded.ndim == 3 and embedded.shape[1] > 0, "the input has no tokens [rows, tokens]")
    (B, T, _), past, device = embedded.shape, cache.length, embedded.device
    total, starts, ends = past + T, cache.starts or [0] * B, [past + T] * B
    what = f"{B} rows of {T} tokens after {past} in the cache"
    require(len(starts) == B, f"{what}, which has {len(starts)} rows")
    if mask is not None:
        size = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        require(size == [B, total], f"attention_mask {size} is not {[B, total]}: {what}")
        known, starts = starts, mask.bool().long().cumsum(1).eq(0).sum(1).tolist()
        ends = [x + y for x, y in zip(starts, mask.bool().sum(1).tolist(), strict=True)]
        require([min(x, past) for x in starts] == known, "attention_mask is not the cache's")
    first, end = (torch.tensor(x, device=device)[:, None] for x in (starts, ends))
    columns = torch.arange(total, device=device)
    real = (columns >= first) & (columns < end)
    is_span = mask is None or bool((mask == real).all())
    require(is_span, "attention_mask has padding between tokens, or is not of 0 and 1")
    real, columns = real[:, past:], columns[past:]
    fits = positions is None or positions.shape in ((T,), (1, T), (B, T))
    if fits and positions is not None:
        fits = any(bool(((positions == x) | ~real).all()) for x in (columns, columns - first))
    require(fits, f"position_ids are not those that cache and attention_mask give: {what}")
    return list(zip(starts, ends, strict=True)), real


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (unit * self.weight.float()).to(x.dtype)


def attend(
    q: Tensor,
    near: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    first_tokens: int,
    logits: Tensor | None,
) -> Tensor:
    """Queries [B, N, T, H] and keys [B, K, S, H] that end together; a window counts the query, and
    has the first tokens beside it, where `near` are the queries. `logits` [N]: a term in the
    denominator of each head."""
    before, results, N = k.shape[2] - q.shape[2], [], q.shape[1]
    has_near, scale = near is not q and window is not None, q.shape[-1] ** -0.5
    if logits is not None:
        k, v = (torch.cat([x, x.new_zeros(*x.shape[:2], 1, x.shape[3])], 2) for x in (k, v))
    for start in range(0, q.shape[2], _QUERIES):
        part = q[:, :, start : start + _QUERIES]
        first = before + start
        stop, begin = first + part.shape[2], 0 if window is None else max(first + 1 - window, 0)
        query = torch.arange(first, stop, device=q.device)[:, None]
        key = torch.arange(stop, device=q.device)
        key = key[(key >= begin) | (key < first_tokens)]
        mask = key <= query
        if window is not None:
            mask &= (key > query - window) | (key < first_tokens)
        if logits is not None:
            mask = torch.where(mask, 0.0, -math.inf).to(q.dtype).expand(N, -1, -1)
            own = logits.to(q.dtype)[:, None, None].expand(-1, len(query), 1)
            mask, key = (
                torch.cat([mask, own], 2),
                torch.cat([key, key.new_tensor([k.shape[2] - 1])]),
            )
        keys, values = k[:, :, key], v[:, :, key]
        if has_near:  # the first tokens are asked by another half of a wider head
            part = torch.cat([part, near[:, :, start : start + _QUERIES]], -1)
            is_first = (key < first_tokens)[:, None]
            keys = torch.cat([keys.masked_fill(is_first, 0), keys.masked_fill(~is_first, 0)], -1)
        options = {"attn_mask": mask, "enable_gqa": True, "scale": scale}
        results.append(F.scaled_dot_product_attention(part, keys, values, **options))
    return torch.cat(results, 2).transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """One projection of queries, keys and values; a result for each window."""

    def __init__(self, config: TTCDConfig, windows: list[int | None]) -> None:
        super().__init__()
        c, size, groups = config.model, config.head_dim, config.num_key_value_heads
        self.size, self.windows, self.has_norm = size, windows, c["has_qk_norm"]
        counts = {"q": config.num_attention_heads, "k": groups, "v": groups}
        for name, count in counts.items():
            project = nn.Linear(config.hidden_size, count * size, bias=c["has_qkv_bias"])
            self.add_module(f"{name}_proj", project)
            if self.has_norm and name != "v":
                self.add_module(f"{name}_norm", RMSNorm(size, c["qk_norm_eps"]))
        self.o_proj = nn.Linear(counts["q"] * size, config.hidden_size, bias=False)
        self.first_tokens = c.get("sink_tokens", 0)
        self.has_reach = bool(self.first_tokens) and c.get("sink_reach") is not None
        self.sinks = None
        if c.get("has_sink_logits"):
            self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads))

    def _heads(self, name: str, h: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        x = getattr(self, f"{name}_proj")(h).unflatten(-1, (-1, self.size)).transpose(1, 2)
        if turn is None:
            return x
        x = getattr(self, f"{name}_norm")(x) if self.has_norm else x
        first, second = x.float().chunk(2, -1)
        cos, sin = turn
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)

    def forward(self, h: Tensor, turn: Any, past: _State) -> tuple[list[Tensor], _State]:
        """The results, and the keys and values that later tokens see."""
        turn, near = turn
        q, *seen = self._heads("q", h, turn), self._heads("k", h, turn), self._heads("v", h, None)
        near = self._heads("q", h, near) if self.has_reach else q
        seen = [torch.cat(pair, 2) for pair in zip(past, seen, strict=True)] if past else seen
        sinks = self.first_tokens, self.sinks
        results = [self.o_proj(attend(q, near, *seen, window, *sinks)) for window in self.windows]
        if None not in self.windows:
            stop = seen[0].shape[2]
            begin = max(stop + 1 - max(self.windows), 0)
            first = min(self.first_tokens, begin)
            seen = [torch.cat([x[:, :, :first], x[:, :, begin:]], 2) for x in seen]
        return results, seen


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

    def __init__(self, config: TTCDConfig, settings: dict[str, Any] | None) -> None:
        super().__init__()
        D, H, self.settings = config.hidden_size, config.intermediate_size, settings
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
        if settings.get("error") == "learned":
            self.ttt_value = nn.Linear(H, D, bias=False)
        if is_distilling and settings["has_token_rate"]:
            self.b_proj = nn.Parameter(torch.zeros(D))
        if settings["decay"] != "constant":
            self.ttt_decay = nn.Parameter(torch.zeros(len(settings["half_lives"])))
        if settings["decay"] == "gated":
            self.ttt_decay_gate = nn.Linear(D, len(settings["half_lives"]), bias=False)

    def features(self, x: Tensor) -> Tensor:
        return F.silu(self.gate_proj(x)) * self.up_proj(x)

    def forward(self, x: Tensor, t: Tensor, past: _State) -> tuple[Tensor, _State]:
        """y [B, T, D], and the sum and open inputs; `t`: the student, or the targets."""
        if self.settings is None:
            return self.down_proj(self.features(x)), []
        size, results = self.settings["chunk_size"], []
        inputs = self._inputs(x, t)
        total, *opened = past or [
            torch.zeros(len(x), *self.down_proj.weight.mT.shape, device=x.device),
            *(part[:, :0] for part in inputs),
        ]
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
        return torch.cat(results, 1), [total, *opened]

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
            if hasattr(self, "ttt_value"):
                errors = self.ttt_value(features)
            else:
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
        is_fast = layer in c["fast_layers"]
        has_student = is_fast and "has_student_conv" in c["memory"]
        windows = [config.sliding_window, *([c["student_window"]] if has_student else [])]
        self.input_layernorm = RMSNorm(config.hidden_size, eps)
        self.self_attn = Attention(config, windows)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps)
        self.mlp = MLP(config, c["memory"] if is_fast else None)
        self.stores_embeddings = is_fast and c["memory"].get("target") == "embedding"

    def forward(
        self, h: Tensor, embedded: Tensor, turn: Any, past: _State
    ) -> tuple[Tensor, _State]:
        seen, kept = self.self_attn(self.input_layernorm(h), turn, past[:2])
        x, t = (self.post_attention_layernorm(h + seen[i]) for i in (0, -1))
        t = embedded if self.stores_embeddings else t
        y, memory = self.mlp(x, t, past[2:])
        return h + seen[0] + y, kept + memory


class TTCDModel(nn.Module):
    def __init__(self, config: TTCDConfig) -> None:
        super().__init__()
        self.rotary, self.gradient_checkpointing = config.rotary, False
        self.sink_reach = config.model.get("sink_reach") or math.inf
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.model["norm_eps"])

    @property
    def is_recomputed(self) -> bool:
        return self.gradient_checkpointing and self.training

    def forward(
        self, embedded: Tensor, spans: list[Any], cache: TTCDCache, keeps: bool, every: bool
    ) -> list[Tensor]:
        """The result, with `every` also the input of every layer; zero at padding. `spans`: of
        every row the first column with a token and the one after the last."""
        past, groups, kept = cache.length, {}, {}
        for row, span in enumerate(spans):
            groups.setdefault(span, []).append(row)
        results = [torch.zeros_like(embedded) for _ in range(1 + every * len(self.layers))]
        for (first, end), rows in groups.items():
            part = slice(max(first - past, 0), end - past)
            if part.start < part.stop:
                start, before = max(past - first, 0), cache.groups.get(first)
                read = self._read(embedded[rows, part], start, before, keeps, every)
                states, kept[first] = read
                for whole, state in zip(results, states, strict=True):
                    whole[rows, part] = state
        if keeps:
            cache.groups, cache.length = kept, past + embedded.shape[1]
            cache.starts = [first for first, _ in spans]
        return results

    def _read(
        self, h: Tensor, start: int, before: list[_State] | None, keeps: bool, every: bool
    ) -> tuple[list[Tensor], list[_State]]:
        """The same of rows without padding, after `start` tokens; and what later tokens need."""
        embedded, states, after = h, [], []
        positions = torch.arange(start, start + h.shape[1], device=h.device, dtype=torch.float32)
        frequencies = torch.tensor(self.rotary["frequencies"], device=h.device)
        angles = (
            x[:, None] * frequencies for x in (positions, positions.clamp(max=self.sink_reach - 1))
        )
        magnitude = self.rotary["magnitude"]
        turn = [(magnitude * angle.cos(), magnitude * angle.sin()) for angle in angles]
        for i, layer in enumerate(self.layers):
            states += [h] if every else []
            inputs = h, embedded, turn, before[i] if before else []
            if self.is_recomputed and not keeps:
                h, _ = self._gradient_checkpointing_func(layer.__call__, *inputs)
            else:
                h, state = layer(*inputs)
                after += [state] if keeps else []
        return [*states, self.norm(h)], after


class TTCDForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = TTCDConfig
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _no_split_modules = ["Block"]  # noqa: RUF012
    _is_stateful = _supports_cache_class = _supports_sdpa = supports_gradient_checkpointing = True

    def __init__(self, config: TTCDConfig) -> None:
        super().__init__(config)
        self.model = TTCDModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def tie_weights(self, *args: Any, **options: Any) -> None:
        if "missing_keys" in options:  # a tied head is missing: 5.3 forgets it in remote code
            options["missing_keys"].update(self.all_tied_weights_keys)
        super().tie_weights(*args, **options)

    def get_compiled_call(self, *args: Any) -> Any:
        return self.__call__  # a compiler cannot follow the rows

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("pages of a cache cannot hold a memory: use generate without paging")

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
    ) -> None:
        kind, mask = generation_config.cache_implementation, model_kwargs.get("attention_mask")
        require(kind in (None, "dynamic"), f"cache_implementation {kind!r} cannot hold a memory")
        require(mask is None or bool(mask.any(1).all()), "attention_mask has a row without tokens")
        if generation_config.use_cache is not False and model_kwargs.get(_CACHE) is None:
            model_kwargs[_CACHE] = TTCDCache()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: TTCDCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        cache: TTCDCache | None = None,
        token_type_ids: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **loss_kwargs: Any,
    ) -> Any:
        """As that of a Llama of any version. `loss_kwargs`: what the loss takes by name."""
        config = self.config
        require(cache is None or past_key_values is None, "cache or past_key_values: pass one")
        old = given(given(cache, past_key_values), TTCDCache())
        require(isinstance(old, TTCDCache), f"a {type(old).__name__} cannot hold a memory")
        require((input_ids is None) != (inputs_embeds is None), "pass input_ids or inputs_embeds")
        require(token_type_ids is None or not token_type_ids.any(), "token_type_ids are not all 0")
        asked = given(output_attentions, config.output_attentions)
        require(not asked, "output_attentions: weights of attention are never made")
        loss_kwargs.pop("tokenizer", None)  # that generate hands over with stop strings
        columns = loss_kwargs.pop("cache_position", None)  # one too many in 5.0, after pieces
        has_loss = self._has_loss(labels, logits_to_keep, loss_kwargs)
        wants = config.use_cache and not (has_loss or self.model.is_recomputed)
        every = given(output_hidden_states, config.output_hidden_states)
        keeps = given(use_cache, wants)
        embedded = self.model.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        in_turn = columns is None or columns.diff().tolist() == [1] * (embedded.shape[1] - 1)
        require(in_turn, "cache_position is not one after the other")
        spans, real = rows_of(embedded, attention_mask, position_ids, old)
        total = old.length + embedded.shape[1]
        is_left = {end for _, end in spans} == {total} or (
            has_loss and not keeps and not old.length
        )
        require(is_left, "attention_mask ends with padding: pad on the left, or give labels alone")
        is_new = cache is None and past_key_values is None
        is_empty = is_new and any(first == total for first, _ in spans)
        require(not is_empty, "attention_mask has a row without tokens")
        states = self.model(embedded, spans, old, keeps, every)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits, loss = self.lm_head(states[-1][:, kept]), None
        if has_loss:  # padding predicts nothing, and nothing predicts it
            is_pair = torch.cat([real[:, :1], real[:, 1:] & real[:, :-1]], 1)
            is_whole = loss_kwargs.get("shift_labels") is None or bool(real.all())
            require(is_whole, "shift_labels with padding: pass labels alone")
            if labels is not None:
                labels = labels.masked_fill(~is_pair, loss_kwargs.get("ignore_index", -100))
            names = {"logits": logits, "labels": labels, "vocab_size": config.vocab_size}
            loss = self.loss_function(**names, **loss_kwargs)
        hidden, last = tuple(states) if every else None, {_CACHE: old if keeps else None}
        output = CausalLMOutputWithPast(loss=loss, logits=logits, hidden_states=hidden, **last)
        return output if given(return_dict, config.return_dict) else output.to_tuple()

    def _has_loss(self, labels: Any, kept: int | Tensor, options: dict[str, Any]) -> bool:
        parameters = inspect.signature(self.loss_function).parameters.values()
        takes = {x.name for x in parameters if x.kind != x.VAR_KEYWORD} - {"logits", "vocab_size"}
        if unknown := sorted(set(options) - takes):
            raise TypeError(f"{type(self).__name__}.forward takes no {', '.join(unknown)}")
        has_loss = labels is not None or options.get("shift_labels") is not None
        keeps_all = isinstance(kept, int) and kept == 0
        require(keeps_all or not has_loss, "a loss needs all logits: pass logits_to_keep=0")
        return has_loss
