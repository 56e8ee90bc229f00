"""The page faults of a program with 64 MiB of temporaries, after it has run six times.

Run by `test_allocation.py`.
"""

import resource

import jax

import ttcd_jax.models.transformer  # noqa: F401

outer_sum = jax.jit(lambda x: jax.lax.optimization_barrier(x[:, None] * x).sum())
x = jax.numpy.ones(4096)


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    outer_sum(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


print([faults() for _ in range(12)][6:])
