# pyright: basic, reportMissingImports=false
"""The authors' program of the case `peer`, for an interpreter that has the packages of their code
and none of ours: `python peer_torch.py CHECKOUT FOLDER eager|compiled`. FOLDER holds a model as
they store it, `tokens.npy` and `run.json`. After "ready", it takes a training step for every line
of its standard input and answers with the loss. Plain operations replace Triton kernels and flash
attention, which need a GPU.
"""

import functools
import importlib
import json
import os
import sys
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
    if not 0 < window < length:
        return attend(q, k, v, is_causal=causal).transpose(1, 2)
    size, blocks = max(window // 2, 1), []
    for start in range(0, length, size):
        stop, first = min(start + size, length), max(start + 1 - window, 0)
        part, seen = q[:, :, start:stop], (x[:, :, first:stop] for x in (k, v))
        blocks.append(attend(part, *seen, _band(stop - start, stop - first, window)))
    return torch.cat(blocks, 2).transpose(1, 2)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, **_: Any) -> torch.Tensor:
    cos, sin = (table[: x.shape[1], None] for table in (cos, sin))
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
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **unfused).train()
    for layer in model.model.layers:
        layer.mlp.eval()  # computes no norms for the log, and all else as in training
    return model


def main(checkout: str, folder: str, mode: str) -> None:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    recipe = json.loads(Path(folder, "run.json").read_text())["optimizer"]
    tokens = torch.from_numpy(np.load(Path(folder, "tokens.npy"))).long()
    model, rate = _model(Path(checkout), Path(folder)), recipe["schedule"]["peak"]
    betas = recipe["beta1"], recipe["beta2"]
    constants = {name: recipe[name] for name in ("eps", "weight_decay")}
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas, fused=True, **constants)

    def loss_of(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(input_ids=inputs).logits.flatten(0, 1), targets.flatten())

    loss_of = torch.compile(loss_of) if mode == "compiled" else loss_of
    print("ready", flush=True)
    for _ in sys.stdin:
        loss = loss_of(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["clip_norm"] or torch.inf)
        optimizer.step()
        optimizer.zero_grad()
        print(loss.item(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
