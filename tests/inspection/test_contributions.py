"""Who wrote what a token reads, against the memories themselves with single writes removed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_close, draw

from ttcd_jax.inspection.inspection import _joined
from ttcd_jax.memory.chunks import chunk_segments, from_chunks, to_chunks
from ttcd_jax.memory.prefix import PrefixMemory, PrefixOptions, Writes
from ttcd_jax.memory.running import CorrectingMemory
from ttcd_jax.methods.in_place import Operands
from ttcd_jax.methods.ipttcd_stream import StreamMemory

T, L, F, D = 18, 4, 5, 6
DOCUMENTS = np.repeat([5, 2, 9, 4], [9, 1, 7, 1])[None]
CASES = {  # class, whether there is a beta, groups of columns that decay
    "sum": (PrefixMemory, False, 0),
    "sum, two half-lives": (PrefixMemory, False, 2),
    "delta rule": (CorrectingMemory, True, 0),
    "delta rule without a gate, half-lives": (CorrectingMemory, False, 3),
    "of the stream": (StreamMemory, True, 0),
}


def _case(name, ids):
    """(the memory, its operands, y [T, D] of writes whose errors and keys are changed)."""
    kind, has_rate, groups = CASES[name]
    options = PrefixOptions(0.7, form="blocked", block_chunks=2, state_dtype=jnp.float64)
    w, z, k, e, y = draw(0, (F, D), (1, T, F), (1, T, F), (1, T, D), (1, T, D))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True) if kind is not PrefixMemory else k
    beta, decay = draw(1, (1, T), (1, T, max(groups, 1)))
    beta, decay = jax.nn.sigmoid(beta), -0.3 * decay**2
    memory = kind(w, options)
    reads = jnp.concatenate([k, y], axis=-1) if kind is StreamMemory else z
    tokens = Writes(k, e, decay if groups else None, beta if has_rate else None)
    segments = chunk_segments(ids, L)

    def prepared(writes):
        chunks = jax.tree.map(lambda x: to_chunks(x, L), (reads, writes))
        return memory.prepared(*chunks, segments, length=T)

    @jax.jit
    def run(errors, keys):
        y, _ = memory.row(prepared(tokens._replace(errors=errors, keys=keys)))
        return from_chunks(y, T)[0]

    rows = prepared(tokens)
    parts = [Operands(rows.reads, rows.writes, rows.writes.rate, None, rows.mask, segments, None)]
    return _joined(memory, jax.tree.map(np.asarray, parts)), tokens, run


@pytest.mark.parametrize("ids", [None, DOCUMENTS], ids=["one document", "documents"])
@pytest.mark.parametrize("name", CASES)
def test_a_write_that_is_removed_takes_its_part_of_every_read(name, ids, float64):
    memory, (keys, errors, *_), run = _case(name, None if ids is None else jnp.asarray(ids))
    y, nothing = run(errors, keys), run(0 * errors, keys)
    w, e = memory.weights(np.arange(T))[:, :T], np.asarray(errors[0])
    parts = np.repeat(w, D // w.shape[2], axis=2) * e  # [t, s, D]
    assert_close(parts.sum(1), y - nothing)  # they add up to the read
    assert np.abs(parts).max() > 0.1
    assert not np.triu(np.abs(w).max(-1)).any()  # nobody reads itself, or later tokens

    def without(tree):  # of every token in turn
        keep = 1 - jnp.eye(T)[:, None, :, None]
        return keep * tree[None]

    stored = jax.vmap(lambda e: run(e, keys))(without(errors))
    assert_close(np.moveaxis(parts, 1, 0), y - stored)
    absent = jax.vmap(run)(without(errors), without(keys))
    u = memory.walk.writes.reshape(-1, D)[:T]
    if memory.reads_own_chunk:  # keys are also what is read: a token's own read is another one
        absent = jnp.where(jnp.eye(T, dtype=bool)[..., None], y, absent)
    assert_close(np.moveaxis(np.repeat(w, D // w.shape[2], axis=2) * u, 1, 0), y - absent)
    assert_close(memory.walk.reads.reshape(-1)[:T], np.linalg.norm(y - nothing, axis=-1))
