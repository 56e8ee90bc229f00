"""The tiles that kernels of dual-window attention visit."""

import jax.numpy as jnp
import numpy as np
import pytest
from ttcd_kernels.dual_window.tiles import documents, key_tiles, query_tiles

BLOCK_Q, BLOCK_KV = 16, 8
LENGTHS = ((100, 100), (70, 101), (5, 60))
BANDS = ((0, 1), (0, 16), (16, 60), (7, 200), (20, 20))


@pytest.mark.parametrize("length", [None, 1, 16, 37, "again"])
def test_tiles_cover_the_bands_exactly_and_inner_ones_hide_nothing(length):
    """With documents of some tiles, of one key, whose ids come again."""
    for T, S in LENGTHS:
        ids = np.arange(S) // 30 % 2 if length == "again" else np.arange(S) // (length or S)
        rows = None if length is None else documents(jnp.asarray(ids)[None])
        options = BANDS, T, S, BLOCK_Q, BLOCK_KV, rows
        by_query, by_key = (np.asarray(f(*options))[0] for f in (key_tiles, query_tiles))
        assert (by_query.shape, by_key.shape) == (
            (-(-T // BLOCK_Q), len(BANDS), 4),
            (-(-S // BLOCK_KV), len(BANDS), 4),
        )
        for index, (low, high) in enumerate(BANDS):
            _check(ids, T, low, high, by_query[:, index], by_key[:, index])


def _check(ids, T, low, high, by_query, by_key):
    S, shape = len(ids), (len(by_query), len(by_key))
    row, key = np.arange(T)[:, None], np.arange(S)
    distance = row + S - T - key
    band = (low <= distance) & (distance < high)
    visible = band & (ids[S - T :, None] == ids)
    # Keys before the document of a tile's first query need no visit, nor queries after that of a
    # tile's last key, where ids never fall.
    first = row // BLOCK_Q * BLOCK_Q + S - T
    last = np.minimum(key // BLOCK_KV * BLOCK_KV + BLOCK_KV, S) - 1
    is_after = key >= np.searchsorted(ids, ids[first])
    is_before = row < np.searchsorted(ids, ids[last], "right") - (S - T)
    if (np.diff(ids) < 0).any():
        is_after = is_before = np.ones_like(band)

    def tiles(pairs, fill):
        """[query tiles, key tiles, pairs]."""
        padded = np.full((shape[0] * BLOCK_Q, shape[1] * BLOCK_KV), fill)
        padded[:T, :S] = pairs
        padded = padded.reshape(shape[0], BLOCK_Q, shape[1], BLOCK_KV)
        return padded.swapaxes(1, 2).reshape(*shape, -1)

    def visited(bounds, size):
        """(all, inner) [tiles, size]."""
        tile, bounds = np.arange(size), bounds[:, :, None]
        start, inner_start, inner_stop, stop = bounds.swapaxes(0, 1)
        return (start <= tile) & (tile < stop), (inner_start <= tile) & (tile < inner_stop)

    needed, hidden = tiles(visible, False).any(-1), tiles(~visible, False).any(-1)
    found, inner = visited(by_query, shape[1])
    np.testing.assert_array_equal(found & needed, needed)
    np.testing.assert_array_equal(found, tiles(band & is_after, False).any(-1))
    assert not (inner & hidden).any()
    # Rows after the last query are zeros for the tiles of keys; keys after the last do not exist.
    found_t, inner_t = (x.T for x in visited(by_key, shape[0]))
    np.testing.assert_array_equal(found_t & needed, needed)
    np.testing.assert_array_equal(found_t, tiles(band & is_before, False).any(-1))
    assert not (inner_t & hidden).any()
    if (np.diff(ids) >= 0).all():  # what is whole is inner, from both sides
        whole = tiles(visible, True).all(-1) & needed
        assert (inner_t >= whole).all()
        assert (inner | ~whole | ~tiles(visible, False).all(-1)).all()
