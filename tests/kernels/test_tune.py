"""The search for tiles, with stand-ins for the kernels: it needs a GPU to be of use."""

import json

import jax
import pytest
from ttcd_kernels import launch, tune
from ttcd_kernels.bench import OPS
from ttcd_kernels.decode import triton_call as decode_call
from ttcd_kernels.decode import tuning as decode_tuning
from ttcd_kernels.decode import xla as decode_xla
from ttcd_kernels.dual_window import triton_call as dual_window_call
from ttcd_kernels.dual_window import tuning as dual_window_tuning
from ttcd_kernels.dual_window import xla as dual_window_xla

KERNELS = {
    "dual_window": ["forward", "backward_q", "backward_kv"],
    "decode": ["decode_attention"],
}


@pytest.fixture
def tiles(monkeypatch):
    """The tiles that programs were made with; every second one is too large to compile."""
    seen = []

    def stand_in(function):
        def call(*operands, tuning, **facts):
            seen.append(tuning)
            if len(seen) % 2 == 0:
                raise RuntimeError("out of resources: shared memory")
            return function(*operands, **facts)

        return call

    monkeypatch.setattr(launch, "unavailable", lambda: None)
    monkeypatch.setattr(launch, "capability", lambda *_: 90)
    monkeypatch.setattr(dual_window_call, "dual_window", stand_in(dual_window_xla.dual_window))
    monkeypatch.setattr(decode_call, "decode", stand_in(decode_xla.decode))
    return seen


@pytest.mark.parametrize("op", KERNELS)
def test_each_kernel_is_tried_with_every_tile_and_sorted_by_time(op, tiles, monkeypatch):
    case = OPS[op].SHAPES["parity"][0]._replace(dtype="float32", rounds=1)
    assert list(OPS[op].CANDIDATES) == KERNELS[op]
    few = {}  # the table's and one more
    for kernel, best in OPS[op].tuning(case)._asdict().items():
        few[kernel] = [tile for tile in OPS[op].CANDIDATES[kernel] if tile != best][:1]
    monkeypatch.setattr(OPS[op], "CANDIDATES", few)
    rows = tune.tuned(OPS[op], case)
    assert [row["kernel"] for row in rows] == [name for name in KERNELS[op] for _ in range(2)]
    assert len(tiles) == 2 * len(few)
    assert len({str(tile) for tile in tiles}) == 1 + len(few)  # the table's, and one a kernel
    for ran, refused in zip(rows[::2], rows[1::2], strict=True):
        assert (ran["/ table"], ran["note"]) == (1, "the table's")
        assert ran["time ms"] > 0
        assert refused["time ms"] is None
        assert refused["note"] == "failed: RuntimeError: out of resources: shared memory"


def test_the_command_writes_what_it_prints(tiles, tmp_path, monkeypatch, capsys):
    cases = OPS["dual_window"].SHAPES
    monkeypatch.setitem(cases, "tiny", (cases["parity"][0]._replace(dtype="float32", rounds=1),))
    monkeypatch.setattr(OPS["dual_window"], "CANDIDATES", dict.fromkeys(KERNELS["dual_window"], ()))
    file = tmp_path / "tune.json"
    tune.main(["--shapes", "tiny", "--json", str(file)])
    rows = json.loads(file.read_text())["rows"]
    assert [row["kernel"] for row in rows] == KERNELS["dual_window"]
    assert rows[0]["/ table"] == 1
    assert rows[0]["tile"] in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tune.main(["--shapes", "tiny", "--case", "none"])
    assert "no 'none' in tiny; it has" in capsys.readouterr().err


def test_without_a_gpu_there_is_nothing_to_tune():
    if jax.default_backend() == "gpu":
        pytest.skip("this machine has a GPU")
    with pytest.raises(SystemExit, match="nothing to tune: there is no NVIDIA GPU"):
        tune.main([])


def test_a_table_serves_every_head_dim_and_older_and_newer_gpus():
    for tuning in (dual_window_tuning, decode_tuning):
        assert {dim for _, dim in tuning.TABLE} == set(tuning.HEAD_DIMS)
    for known, capability in ((80, 86), (90, 90)):
        for dim in dual_window_tuning.HEAD_DIMS:
            narrow, wide = (dual_window_tuning.tuning_for(capability, dim, size) for size in (2, 4))
            assert narrow == dual_window_tuning.TABLE[known, dim]
            assert wide == dual_window_tuning.FLOAT32[80, dim]
            narrow, wide = (decode_tuning.tuning_for(capability, dim, size)[0] for size in (2, 4))
            assert narrow == decode_tuning.TABLE[known, dim]
            assert wide.block_n == narrow.block_n // 2
