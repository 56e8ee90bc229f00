"""The kernels on a GPU, where there is one: `pytest -m gpu`."""

import json

import pytest
from ttcd_kernels import check, launch, tune
from ttcd_kernels.bench import OPS
from ttcd_kernels.dual_window import mosaic_call
from ttcd_kernels.tune import Job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """As users compile; its compute capability."""
    reason = launch.unavailable()
    if reason is not None:
        pytest.skip(reason)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return launch.known_capability()


@pytest.mark.parametrize(
    ("op", "kernel"), [("dual_window", "triton"), ("dual_window", "mosaic"), ("decode", "triton")]
)
def test_results_and_gradients_are_right_and_repeat(op, kernel, gpu, tmp_path):
    if kernel == "mosaic" and gpu != mosaic_call.CAPABILITY:
        pytest.skip(f"mosaic is not for compute capability {gpu}")
    file = tmp_path / "check.json"
    check.main(["--op", op, "--implementation", kernel, "--timeout", "300", f"--output={file}"])
    assert json.loads(file.read_text())["rows"]


@pytest.mark.parametrize(
    ("op", "case"), [("dual_window", "200, full/1 H2/1 D32"), ("decode", "256/256 H6/2 D32")]
)
def test_each_kernel_runs_alone(op, case, tmp_path):
    turn = tmp_path / "turn"
    turn.touch()
    (found,) = (x for x in OPS[op].SHAPES["parity"] if x.name == case)
    for kernel, tile in tune.table_of(OPS[op], found)._asdict().items():
        row = tune.measured(Job(op, "parity", case, kernel, ",".join(map(str, tile))), str(turn))
        assert row["note"] == tune.TABLE
        assert row["ms"] > 0
