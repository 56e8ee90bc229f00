"""Processor time of a greedy token of the real model, one text, beside the time in which the same
processor reads what a token needs: every parameter once, and the whole state. How fast it reads is
measured by 512 MiB of float32 matrices times a vector, in the same process.

    taskset -c 0 python -m tests.smollm2.decoding RUN [compute=bfloat16] [slots=512]

Processor time, not time by the clock: others may use the processor too. Medians of five rounds.
"""

import functools
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from ttcd_jax.inference import SamplingConfig, inference_model, start_state
from ttcd_jax.inference.generate import next_token
from ttcd_jax.inference.sampling import batch_sampler
from ttcd_jax.run.directory import load_run

ROUNDS, TOKENS = 5, 16


def seconds(call):
    """Processor seconds of a call that was made once before."""
    call()
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return statistics.median(times)


def distinct_bytes(*trees):
    """A tied head is one array."""
    return sum({id(x): x.nbytes for x in jax.tree.leaves(trees)}.values())


def main():
    path, *options = sys.argv[1:]
    pairs = [x.split("=") for x in options]
    given = {"compute": "float32", "slots": "512"} | dict(pairs)
    changes = [f"Precision.compute={given['compute']!r}"] if "compute" in dict(pairs) else []
    run = load_run(path, changes=changes)
    model, slots = inference_model(run.model), int(given["slots"])
    state, sampler = start_state(model, 1, max_length=slots), batch_sampler([SamplingConfig()])
    tokens, seen = jnp.ones(1, jnp.int32), jnp.zeros((1, model.config.vocab_size), bool)
    needed = distinct_bytes(model, state)

    def decoded():
        nonlocal tokens, state, seen
        for _ in range(TOKENS):
            tokens, state, seen = next_token(
                model, state, tokens, np.ones(1, bool), sampler, seen, memory="kept"
            )
            np.asarray(tokens)

    matrices, vector = jnp.ones((128, 1024, 1024)), jnp.ones(1024)
    product = functools.partial(jax.jit(lambda x, y: (x @ y).sum()), matrices, vector)
    rate = matrices.nbytes / seconds(lambda: product().block_until_ready())
    took, least = seconds(decoded) / TOKENS, needed / rate
    print(json.dumps({
        "compute": given["compute"], "slots": slots, "ms a token": round(1e3 * took, 1),
        "MB a token": round(needed / 1e6, 1), "GB/s read": round(rate / 1e9, 1),
        "ms to read them": round(1e3 * least, 1), "ratio": round(took / least, 2),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
