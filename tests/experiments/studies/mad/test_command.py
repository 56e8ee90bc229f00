"""The sweep command end to end at toy size, and its configurations."""

import json

import commands
from checks import refused

from experiments.studies.mad.records import claim, record_path
from experiments.studies.mad.sweep import MADSweepConfig, hyper, jobs
from ttcd_jax.commands.cli import CONFIG_DIR
from ttcd_jax.run.bindings import load_config

SWEEP = ("tasks=('compression',)", "methods=('swa',)", "rates=(1e-3, 1e38)", "num_train=12")
TOY = [f"MADSweepConfig.{x}" for x in (*SWEEP, "num_test=8")]
TOY += ["RecipeConfig.batch_size=8", "RecipeConfig.max_steps=4"]


def config(gin="mad/default.gin", *params):
    return load_config(MADSweepConfig, gin, params, config_dir=CONFIG_DIR)


def command(run_dir, *params, beside=()):
    flags = [f"--param={param}" for param in (*TOY, *params)]
    flags += [f"--run_dir={run_dir}", *(f"--beside={x}" for x in beside)]
    return commands.run("mad", "--gin=mad/cpu.gin", *flags)


def test_the_full_sweep_is_data_and_a_file_names_its_command_and_its_hardware():
    whole = config("mad/default.gin", "MADSweepConfig.settings='all'")
    assert (len(jobs(whole)), len(hyper(whole).rate)) == (66 * 10, 6)
    assert (whole.recipe.epochs, whole.recipe.schedule) == (200, "cosine")
    assert (whole.precision.compute, jobs(whole)[0].steps) == ("bfloat16", 20_000)
    sweeps = ("default", 6), ("cpu", 2), ("cpu_short", 2), ("cpu_fuzzy", 1), ("cpu_copying", 1)
    for name, num_tasks in sweeps:
        gin = f"mad/{name}.gin"
        header = (CONFIG_DIR / gin).read_text()
        assert f"python -m experiments.mad --gin={gin}" in header
        assert "hardware:" in header
        assert len(jobs(config(gin))) == 10 * num_tasks


def test_wrong_values_are_refused():
    for words, value in (
        ("none twice", "seeds=(1, 1)"),
        ("each be in 0 .. 2^32 - 1", "seeds=(4294967296,)"),
        ("methods |must each be one of ipttcd", "methods=('gpt',)"),
    ):
        refused(words, config, "mad/default.gin", f"MADSweepConfig.{value}")


def test_the_command_records_prints_and_goes_on(tmp_path):
    run_dir = tmp_path / "sweep"
    first = command(run_dir)
    assert first.returncode == 0, first.stderr
    assert "[1/1] compression.default.swa: accuracy" in first.stdout
    assert "1 of 2 not finite" in first.stdout
    assert "schedule cosine" in first.stdout
    assert (run_dir / "tables.txt").read_text() in first.stdout
    (path,) = (run_dir / "records").glob("*.json")
    assert (run_dir / "curves.compression.svg").read_text().startswith("<svg")
    record = json.loads(path.read_text())
    assert (record["steps"], record["epochs"], record["num_train"]) == (4, 2, 12)
    good, bad = record["runs"]
    assert good["metrics"]["macro_accuracy"] >= 0
    assert (bad["metrics"], bad["failed_at"] is None) == (None, False)

    text = path.read_text()
    path.write_text(json.dumps(record | {"runs": [good | {"metrics": 3}]}))
    assert f"{path} is damaged" in commands.refused("report", f"--run_dir={run_dir}", status=3)
    path.write_text(text)
    report = commands.output("report", f"--run_dir={run_dir}", f"--output={tmp_path}")
    assert "MAD: synthetic tasks (sweep)" in report
    (run_dir / "records" / ".compression.default.full.json.7").write_text("{")  # a torn write
    again = command(run_dir)
    assert again.returncode == 0, again.stderr
    assert "1 of 1 recorded" in again.stdout
    assert "[1/1]" not in again.stdout
    assert path.read_text() == text
    for beside, words in ((tmp_path, "holds no records"), (run_dir, "have the same job")):
        assert words in commands.mistake(command(tmp_path / "new", beside=[beside]))
    assert not (tmp_path / "new").exists()
    other = commands.mistake(command(run_dir, "RecipeConfig.schedule='constant'"))
    assert "recipe.schedule: cosine -> constant; choose another --run_dir" in other


def test_a_job_is_one_process_s_at_a_time(tmp_path):
    first, second, *_ = (record_path(tmp_path, job) for job in jobs(config("mad/cpu_short.gin")))
    with claim(first) as is_ours:
        assert is_ours
        with claim(first) as is_theirs:
            assert not is_theirs
        with claim(second) as is_theirs:
            assert is_theirs
    with claim(first) as is_theirs:
        assert is_theirs  # let go of without a record: to be done again
    first.write_text("{}")
    with claim(first) as is_theirs:
        assert not is_theirs
