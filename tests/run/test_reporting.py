import time

import numpy as np

from ttcd_jax.run.reporting import (
    MetricFiles,
    Progress,
    _warn_of_memory,
    flat_metrics,
    read_metrics,
)


def test_arrays_of_fast_layers_become_scalars():
    flat = flat_metrics({"loss": np.float32(2.0), "memory_ratio": np.array([0.5, 0.25])})
    assert flat == {"loss": 2.0, "memory_ratio/0": 0.5, "memory_ratio/1": 0.25}


def test_records_after_the_checkpoint_are_dropped_and_a_torn_line_is_skipped(tmp_path):
    files = MetricFiles(tmp_path, 0)
    for step in (1, 2, 3):
        files.write(step, {"loss": float(step)})
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')
    # As after a power loss: NULs, a torn line, other JSON.
    path.write_bytes(b'\0\0\0\n{"step": 1, "l\n[]\n{"step": null}\n\xff\n' + path.read_bytes())
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    files = MetricFiles(tmp_path, 2)
    files.write(3, {"loss": 9.0})
    assert [(r["step"], r["loss"]) for r in read_metrics(path)] == [(1, 1), (2, 2), (3, 9)]


def test_a_log_gets_one_line_per_report(capsys, monkeypatch):
    clock = iter((0.0, 50.0, 60.0))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    progress = Progress(0, 20)
    assert progress.update(1) == (1, 50)
    progress.show(1, {"loss": 1.5, "tokens_per_second": 1234.5, "memory_ratio/0": 0.25})
    assert progress.update(5) == (4, 10)
    progress.show(5, {"loss": 1.0, "tokens_per_second": 1000.0, "mfu": 0.5})
    assert capsys.readouterr().out.splitlines() == [
        "step  1/20  loss 1.5000  1,234 tokens/s  15:50 left  |eta S|/|W| 0.250",
        "step  5/20  loss 1.0000  1,000 tokens/s  3:00 left  MFU 50.0%",
    ]


def test_a_loud_memory_and_a_shut_gate_are_warned_of_once(caplog):
    warned = set()
    quiet = {"memory_ratio/0": 1.9, "gate_mean/0": 0.02, "loss": 9.0}
    loud = {"memory_ratio/0": 3.5, "memory_ratio/1": 0.1, "gate_mean/0": 0.004}
    for step, record in enumerate((quiet, loud, loud), start=1):
        _warn_of_memory(step, record, warned)
    ratio, gate = (record.getMessage() for record in caplog.records)
    assert ratio.startswith("step 2: memory_ratio/0 is 3.5, the memory outgrows its weight: lower")
    assert gate.startswith("step 2: gate_mean/0 is 0.004, the gate of the memory shuts")
