"""The first minutes on a GPU, with steps that stand in for its own, in a process that is killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import pytest
from ttcd_kernels import bench, first_run, verified
from ttcd_kernels.dual_window import bench as dual_window

PROGRAM = """
import json, sys
from ttcd_kernels import first_run
first_run.STEPS = [first_run.Step(*step) for step in json.loads(sys.argv[1])]
first_run._LEAST_SECONDS = 0.5
first_run.main(sys.argv[2:])
"""
PASSES = "import sys; open(sys.argv[2], 'w').write('{REPORT}'); print('all right')"
TIMES = {"case": "64K", "pass": "forward", "implementation": "triton", "time ms": 8.25}
TIMES |= {"% of floor": 61.0, "note": "", "temp MiB": 3}
TIMED = PASSES.replace("{REPORT}", json.dumps({"ops": {"dual_window": {"rows": [TIMES]}}}))
CHECK = PASSES.replace("{REPORT}", '{"capability": 90, "rows": []}')
OTHER = PASSES.replace("{REPORT}", "{}")
# A step that hangs, and a process of its own that does.
HANGS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("child", child.pid, flush=True)
time.sleep(100)
"""
CRASHES = "import os; print('segments', flush=True); os.kill(os.getpid(), 11)"


def _start(out, *steps, minutes=1.0):
    steps = [(name, ("-c", code), until) for name, code, until in steps]
    command = [sys.executable, "-c", PROGRAM, json.dumps(steps)]
    command += [f"--minutes={minutes}", f"--out={out}"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=commands.cpu_environment(), **pipes)


def _run(*arguments, **options):
    with _start(*arguments, **options) as process:
        output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


def _steps(out):
    return {row["step"]: row for row in json.loads((out / "first_run.json").read_text())["steps"]}


def _outcomes(out):
    return {name: row["outcome"] for name, row in _steps(out).items()}


def _hanging(out):
    """The process that a hanging step has started, once it has."""
    log = out / "first_run.log"
    for _ in range(600):
        if found := re.search(r"child (\d+)\n", log.read_text() if log.exists() else ""):
            return int(found[1])
        time.sleep(0.05)
    raise AssertionError("the step never started")


def _ends(pid):
    """Whether a process ends, soon after it was killed."""
    stat = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        try:
            if stat.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_a_step_that_hangs_or_crashes_leaves_the_others_their_time(tmp_path):
    out = tmp_path / "out"
    start = time.monotonic()
    status, output, errors = _run(
        *(out, ("check", CHECK, 0.4), ("hangs", HANGS, 0.5), ("late", OTHER, 0.5)),
        *(("crashes", CRASHES, 0.9), ("last", TIMED, 1.0)),
        minutes=0.1,
    )
    assert time.monotonic() - start < 10
    assert status == 0, errors
    steps = _steps(out)
    assert _outcomes(out) == {
        **{"check": "passed", "hangs": "out of time", "late": "not started"},
        **{"crashes": "failed", "last": "passed"},
    }
    assert 1 < steps["hangs"]["seconds"] <= 3.2  # of 6 the first half
    assert steps["crashes"]["last line"] == "segments"
    assert _ends(_hanging(out))
    assert not (out / "hangs.json").exists()
    assert output.splitlines()[-1].split() == ["64K", "forward", "triton", "8.250", "61.00"]
    assert all(f"\n{name} " in output for name in steps)


def test_killed_in_the_middle_its_results_are_there_and_it_goes_on(tmp_path):
    out = tmp_path / "out"
    steps = ("check", CHECK, 0.4), ("middle", HANGS, 0.5), ("last", OTHER, 1.0)
    with _start(out, *steps) as process:
        pid = _hanging(out)
        process.send_signal(signal.SIGKILL)
    assert _outcomes(out) == {"check": "passed"}
    assert (out / "check.json").exists()
    # The step runs on, and would disturb what another call times.
    status, _, errors = _run(out, *steps)
    assert status == 2
    assert "a step of an earlier call still runs" in errors
    os.killpg(os.getpgid(pid), signal.SIGKILL)
    check = (out / "check.json").stat().st_mtime_ns
    for _ in range(2):  # the second time there is nothing left to do
        status, output, errors = _run(
            out, ("check", CRASHES, 0.4), ("middle", OTHER, 0.5), ("last", OTHER, 1.0)
        )
        assert status == 0, errors
        assert _outcomes(out) == dict.fromkeys(("check", "middle", "last"), "passed")
        assert "check: passed in an earlier call" in output
        assert (out / "check.json").stat().st_mtime_ns == check
    assert "last: passed in an earlier call" in output


def test_ended_by_a_signal_it_ends_its_step(tmp_path):
    with _start(tmp_path, ("check", HANGS, 1.0)) as process:
        pid = _hanging(tmp_path)
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    assert _ends(pid)


def test_what_ran_out_of_time_is_tried_again(tmp_path):
    steps = ("check", CHECK, 0.6), ("tiles", HANGS, 1.0)
    assert _run(tmp_path, *steps, minutes=0.05)[0] == 0
    assert _outcomes(tmp_path)["tiles"] == "out of time"
    assert _run(tmp_path, steps[0], ("tiles", "raise SystemExit('no')", 1.0))[0] == 0
    assert _steps(tmp_path)["tiles"]["last line"] == "no"


@pytest.mark.parametrize(("code", "until"), [("raise SystemExit(1)", 0.9), (HANGS, 0.4)])
def test_without_right_kernels_it_fails_after_all_steps(code, until, tmp_path):
    steps = ("check", code, until), ("last", OTHER, 1.0)
    status, _, errors = _run(tmp_path, *steps, minutes=0.05)
    assert (status, _outcomes(tmp_path)["last"]) == (1, "passed")
    assert errors.startswith("the kernels have not been found right: ")


def test_results_of_other_kernels_are_not_mixed(tmp_path, capsys):
    file = tmp_path / "first_run.json"
    arguments = ["--minutes=1", f"--out={tmp_path}"]
    for text, message in [
        ('{"source": "of before", "steps": []}', "has results of other kernels"),
        (f'{{"source": "{verified.source()}"}}', "is no report of this command ('steps')"),
        ("[]", "is no report of this command"),
        ("{", "is no report of this command"),
    ]:
        file.write_text(text)
        with pytest.raises(SystemExit) as leaving:
            first_run.main(arguments)
        assert leaving.value.code == 2
        assert message in capsys.readouterr().err
        assert file.read_text() == text


@pytest.mark.parametrize(
    ("minutes", "out", "message"),
    [
        ("0", "new", "--minutes 0: it must be a number above 0"),
        ("-1", "new", "--minutes -1: "),
        ("nan", "new", "--minutes nan: "),
        ("inf", "new", "--minutes inf: "),
        ("9", "none/new", "create it first"),
        ("9", "file", "--out: [Errno 17] File exists"),
    ],
)
def test_wrong_arguments_are_refused(minutes, out, message, tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as leaving:
        first_run.main([f"--minutes={minutes}", f"--out={tmp_path / out}"])
    assert leaving.value.code == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("python -m ttcd_kernels.first_run: error: ")
    assert message in error
    assert not (tmp_path / "new").exists()


def test_the_steps_are_in_order_and_name_what_exists():
    assert first_run.STEPS[0].name == first_run.CHECK
    assert [step.until for step in first_run.STEPS] == sorted({x.until for x in first_run.STEPS})
    assert first_run.STEPS[-1].until == 1
    assert len({step.name for step in first_run.STEPS}) == len(first_run.STEPS)
    assert dual_window.SHAPES["paper"][0].name == first_run.LONG
    for step in first_run.STEPS[1:]:
        _, module, *arguments = step.arguments
        parser = bench.parser_of(module, "", ["dual_window", "decode"], "paper")
        parser.add_argument("--implementation", nargs="+")
        parser.add_argument("--times_only", action="store_true")
        assert bench.parsed(parser, arguments).case
