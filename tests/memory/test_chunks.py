import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same, draw

from ttcd_jax.memory.chunks import chunk_segments, from_chunks, masked, memory_mask, to_chunks


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 11])
def test_chunks_round_trip_at_any_length(length):
    (x,) = draw(0, (2, length, 3))
    chunks = to_chunks(x, 4)
    assert chunks.shape == (2, -(-length // 4), 4, 3)
    assert_same(from_chunks(chunks, length), x)
    assert not np.asarray(chunks).reshape(2, -1, 3)[:, length:].any()


def test_a_whole_row_without_documents_needs_no_mask():
    assert memory_mask(None, 8, 4) == (None, None, None)


def test_padding_never_writes():
    mask = memory_mask(None, 6, 4)
    assert np.asarray(mask.writes).tolist() == [[[True] * 4, [True, True, False, False]]]
    assert mask.reads is None
    assert mask.resets is None


def _by_definition(ids: list[int], chunk_size: int):
    """(writes, reads, resets) token by token. A chunk's last document writes; a token reads if the
    chunk before ended in its document; the state is dropped if the two ends differ."""
    pad = -len(ids) % chunk_size
    padded = [*ids, *[ids[-1]] * pad]
    chunks = [padded[i : i + chunk_size] for i in range(0, len(padded), chunk_size)]
    ends = [chunks[0][0], *(chunk[-1] for chunk in chunks)]
    real = [position < len(ids) for position in range(len(padded))]
    writes = [
        real[c * chunk_size + i] and chunk[i] == chunk[-1]
        for c, chunk in enumerate(chunks)
        for i in range(chunk_size)
    ]
    reads = [token == ends[c] for c, chunk in enumerate(chunks) for token in chunk]
    return writes, reads, [ends[c] != ends[c + 1] for c in range(len(chunks))]


@pytest.mark.parametrize(
    "ids",
    [
        [1] * 8,
        [1] * 4 + [2] * 4,
        [1, 1, 2, 3, 3, 3, 3, 3, 3, 4, 4],
        [1, 2, 3, 4, 5, 6, 7],
        [1] * 9 + [2],
        [7],
    ],
)
def test_masks_follow_the_documents(ids):
    mask = memory_mask(chunk_segments(jnp.array([ids]), 4), len(ids), 4)
    expected = _by_definition(ids, 4)
    assert [np.asarray(part).ravel().tolist() for part in mask] == list(expected)


def test_masked_tokens_are_zero():
    (x,) = draw(0, (1, 2, 2, 3))
    mask = jnp.array([[[True, False], [False, True]]])
    kept = masked(x, mask)
    assert_same(kept[mask], x[mask])
    assert not np.asarray(kept[~mask]).any()
    assert masked(x, None) is x


def test_segments_follow_their_chunks_and_padding_the_last_document():
    assert chunk_segments(None, 4) is None
    ids = chunk_segments(jnp.array([[1, 1, 2, 2, 2]]), 4)
    assert np.asarray(ids).tolist() == [[[1, 1, 2, 2], [2, 2, 2, 2]]]
