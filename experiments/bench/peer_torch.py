# pyright: basic, reportMissingImports=false
"""The authors' program of the case `peer`, for an interpreter that has the packages of their code
and none of ours: `python peer_torch.py CHECKOUT FOLDER WORK NUM_TOKENS eager|compiled`. FOLDER
holds a model as they store it, `tokens.npy` and `run.json`. After "ready", it takes a training step
(WORK: step), reads the prompts (prefill) or decodes NUM_TOKENS tokens behind them (decode) for
every line of its standard input, and answers with the loss or with greedy tokens. Plain operations
replace Triton kernels and flash attention, which need a GPU.
"""

import functools
import importlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn import functional as F


@functools.cache
def _band(rows: int, keys: int, window: int) -> torch.Tensor:
    """Whether a query sees a key, of `rows` queries that end with the last key."""
    past = keys - rows
    return torch.ones(rows, keys, dtype=torch.bool).tril(past).triu(past + 1 - window)


def _attend(q: Any, k: Any, v: Any, causal: bool, window_size: tuple[int, int]) -> torch.Tensor:
    """Causal flash attention by `scaled_dot_product_attention`, in blocks of half a window."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    length, window = q.shape[2], window_size[0] + 1
    attend = functools.partial(F.scaled_dot_product_attention, enable_gqa=q.shape[1] != k.shape[1])
    if length == 1 or not 0 < window < length:  # one token: the cache holds its window
        return attend(q, k, v, is_causal=causal and length > 1).transpose(1, 2)
    size, blocks = max(window // 2, 1), []
    for start in range(0, length, size):
        stop, first = min(start + size, length), max(start + 1 - window, 0)
        part, seen = q[:, :, start:stop], (x[:, :, first:stop] for x in (k, v))
        blocks.append(attend(part, *seen, _band(stop - start, stop - first, window)))
    return torch.cat(blocks, 2).transpose(1, 2)


def _rotate(x: Any, cos: Any, sin: Any, *, seqlen_offsets: int = 0, **_: Any) -> torch.Tensor:
    cos, sin = (table[seqlen_offsets:][: x.shape[1], None] for table in (cos, sin))
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)


_PLAIN = {"swiglu": lambda gate, up: F.silu(gate) * up}
_PLAIN |= {"rotary_embedding": _rotate, "flash_attn_func": _attend}


def _model(checkout: Path, folder: Path) -> torch.nn.Module:
    sys.path[:1] = [str(checkout / "3rdparty" / "flash-linear-attention"), str(checkout)]
    for module in ("custom_models.ipttcd", "custom_models.ipttt", "fla.models.transformer"):
        importlib.import_module(module)  # makes its models known to transformers
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] in ("fla", "custom_models"):
            for kernel in _PLAIN.keys() & vars(module).keys():
                setattr(module, kernel, _PLAIN[kernel])
    unfused = dict.fromkeys(("fuse_norm", "fuse_swiglu", "fuse_cross_entropy"), False)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **unfused)


def _step(model: Any, tokens: torch.Tensor, mode: str, recipe: Any) -> Callable[[], list[Any]]:
    model.train()
    for layer in model.model.layers:
        layer.mlp.eval()  # computes no norms for the log, and all else as in training
    rate = recipe["schedule"]["peak"]
    betas = recipe["beta1"], recipe["beta2"]
    constants = {name: recipe[name] for name in ("eps", "weight_decay")}
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas, fused=True, **constants)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())

    loss_of = torch.compile(loss_of) if mode == "compiled" else loss_of

    def take() -> list[Any]:
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip_norm"] or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        return [loss.item()]

    return take


def _greedy(model: Any, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """The greedy tokens [B, 1] behind prompts [B, T]; each is read when the next is asked for."""
    cache, count = importlib.import_module("fla.models.utils").Cache(), 0
    # fla counts a token in its first layer: the others would rotate it by one too many (its #766).
    cache.get_seq_length = lambda *_: count
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    while True:
        logits = model(input_ids=tokens, **options).logits
        count += tokens.shape[1]
        yield (tokens := logits[:, -1:].argmax(-1))


def _inference(model: Any, prompts: torch.Tensor, work: str, num_tokens: int) -> Callable[[], Any]:
    if work == "prefill":
        return lambda: next(_greedy(model, prompts)).flatten().tolist()
    tokens = _greedy(model, prompts)
    next(tokens)
    return lambda: torch.cat([*itertools.islice(tokens, num_tokens)]).flatten().tolist()


def main(checkout: str, folder: str, work: str, num_tokens: str, mode: str) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tokens = torch.from_numpy(np.load(Path(folder, "tokens.npy"))).long()
    model = _model(Path(checkout), Path(folder))
    if work == "step":
        recipe = json.loads(Path(folder, "run.json").read_text())["optimizer"]
        take = _step(model, tokens, mode, recipe)
    else:
        torch.set_grad_enabled(False)
        model = torch.compile(model.eval()) if mode == "compiled" else model.eval()
        take = _inference(model, tokens[:, :-1], work, int(num_tokens))
    print("ready", flush=True)
    for _ in sys.stdin:
        print(*take(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
