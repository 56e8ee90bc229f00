"""The step benchmark at tiny sizes."""

import json

import commands
import pytest

TINY = """
RunConfig.data = @RecallConfig()
RunConfig.optimizer = @OptimizerConfig()
RunConfig.steps = 4
RunConfig.batch_size = 2
RecallConfig.num_slots = 8
RecallConfig.num_keys = 4
RecallConfig.num_values = 4
TransformerConfig.vocab_size = 8
TransformerConfig.dim = 8
TransformerConfig.num_layers = 1
TransformerConfig.num_heads = 2
TransformerConfig.mlp_dim = 8
OptimizerConfig.schedule = @ScheduleConfig()
ScheduleConfig.peak = 1e-2
ScheduleConfig.warmup = 2
"""


@pytest.fixture
def files(tmp_path):
    full, windowed = tmp_path / "full.gin", tmp_path / "swa.gin"
    full.write_text(TINY + "TransformerConfig.method = 'full'\n")
    windowed.write_text(TINY + "TransformerConfig.method = 'swa'\nTransformerConfig.window = 4\n")
    return full, windowed


def test_two_files_are_measured_beside_each_other(files, tmp_path):
    report = tmp_path / "report.json"
    ginned = [f"--gin={path}" for path in files]
    result = commands.run(
        "bench_step",
        *ginned,
        "--param=RunConfig.batch_size=4",
        "--rounds=2",
        f"--json={report}",
        is_forked=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert all(str(path) in result.stdout for path in files)
    report = json.loads(report.read_text())
    assert report["environment"]["device_count"] >= 1
    first, second = report["rows"]
    assert first["time_ratio"] == first["flops_ratio"] == 1
    assert second["flops_ratio"] < 1, "a window shows fewer pairs"
    for row in (first, second):
        assert row["tokens"] == 4 * 15
        assert row["tokens_per_second"] == pytest.approx(row["tokens"] / row["seconds"])
        assert row["time_ratio"] == pytest.approx(row["seconds"] / first["seconds"])
        assert min(row["seconds_to_hand_over"], row["seconds_while_saving"]) > 0
        assert row["mfu"] is None, "nobody knows a CPU's peak"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gin=a.gin", "--gin=a.gin"], "--gin names a file twice: a.gin, a.gin"),
        (["--gin=a.gin", "--json=no/x.json"], "--json: no folder no; create it first"),
        (["--gin=quikstart.gin", "--saves=0"], "quickstart.gin"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    result = commands.run("bench_step", *arguments)
    assert message in commands.mistake(result)
