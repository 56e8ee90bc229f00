"""The kernels on a GPU, where there is one: `pytest -m gpu`."""

import json

import pytest
from ttcd_kernels import launch
from ttcd_kernels.dual_window import mosaic_call

from experiments.studies.kernels import __main__ as hour
from experiments.studies.kernels import tune
from experiments.studies.kernels.cases import OPS
from experiments.studies.kernels.runner import Job

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
    line = ["--steps", "check", "--op", op, "--implementation", kernel, "--timeout", "300"]
    hour.main([*line, f"--output={file}"])
    assert json.loads(file.read_text())["rows"]


@pytest.mark.parametrize(
    ("op", "case"), [("dual_window", "257, full/64 H2/2 D96"), ("decode", "256/256 H6/2 D32")]
)
def test_each_kernel_runs_alone(op, case):
    found = next(x for x in OPS[op].SHAPES["check"] if (x.name, x.dtype) == (case, "bfloat16"))
    for kernel, tile in tune.table_of(OPS[op], found)._asdict().items():
        row = tune.measured(Job("tiles", op, case, "bfloat16", kernel, ",".join(map(str, tile))))
        assert row["note"] == tune.TABLE
        assert row["ms"] > 0
