"""Milliseconds of a training step in PyTorch, eager and compiled, of an exported published sum.

    python step.py FOLDER [ROWS TOKENS ROUNDS]   with torch and transformers

The memory's chunks are computed together, as a sum over chunks, not in a loop as in the file of the
export, whose loss must be the same. Beside it: `python -m experiments.bench step --gin=RECIPE` with
the recipe of the export, in turns, on the same idle cores.
"""

import statistics
import sys
import time

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM


def together(mlp, x, t, past):
    """`MLP.forward` of rows of whole chunks without a past, by the published sum."""
    settings = mlp.settings
    if settings is None:
        return mlp.down_proj(mlp.features(x)), []
    assert (settings["corrects_errors"], settings["half_lives"], past) == (False, [], [])
    chunks = (-1, settings["chunk_size"])
    features, student, rate, _ = (part.unflatten(1, chunks) for part in mlp._inputs(x, t))

    def convolved(name, x):
        return mlp._convolved(name, x.flatten(0, 1)).view_as(x)

    teacher, keys = convolved("teacher_conv", features), convolved("student_conv", student)
    errors = mlp.down_proj(teacher - keys) * rate
    if settings["has_proj"]:
        errors = errors @ mlp.ttt_proj.weight
    if settings["normalizes_keys"]:
        keys = F.normalize(keys, dim=-1, eps=1e-6)
    deltas = keys.mT @ errors
    before = deltas.cumsum(1) - deltas
    reads = {"teacher": teacher, "teacher_raw": features, "student": keys}[settings["output"]]
    y = mlp.down_proj(reads) + settings["eta"] * (reads @ before)
    return y.flatten(1, 2), []


def main(folder, rows="8", tokens="512", rounds="7"):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    ids = torch.randint(model.config.vocab_size, (int(rows), int(tokens) + 1))
    parts = model.model

    def loss_of(ids):
        states, _ = parts._read(parts.embed_tokens(ids[:, :-1]), 0, None, False, False)
        return F.cross_entropy(model.lm_head(states[-1]).flatten(0, 1), ids[:, 1:].flatten())

    with torch.no_grad():
        looped = loss_of(ids)
        type(parts.layers[0].mlp).forward = together
        torch.testing.assert_close(loss_of(ids), looped, rtol=1e-5, atol=1e-5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def median(loss):
        seconds = []
        for _ in range(int(rounds) + 2):  # the first two warm up
            start = time.perf_counter()
            loss(ids).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.perf_counter() - start)
        return 1e3 * statistics.median(seconds[2:])

    for name, loss in (("eager", loss_of), ("compiled", torch.compile(loss_of))):
        print(f"torch {torch.__version__}, {name}: {median(loss):.1f} ms a step", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
