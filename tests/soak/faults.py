"""The table of faults: each starts processes of the run, and injects itself before or meanwhile."""

import fcntl
import os
import random
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGTERM
from typing import Any

from tests.soak.run import STOPPED, Broken, Fault, Inject, Job, Run, check_rows
from ttcd_jax.run.directory import METRICS
from ttcd_jax.run.reporting import read_metrics
from ttcd_jax.train.watchdog import PEER_LOST

Damage = Callable[[Path, random.Random], object]


class Unavailable(Exception):
    """This machine cannot have the fault."""


def drawn(kinds: Sequence[str], seed: int, number: int) -> tuple[str, random.Random]:
    """The kind of a fault and its random numbers, from the seed and its number alone: every kind
    comes once before one comes again."""
    turn, place = divmod(number, len(kinds))
    order = random.Random(f"{seed} {turn}").sample(kinds, len(kinds))
    return order[place], random.Random(f"{seed}:{number}")


def _started(*params: str, **options: Any) -> Inject:
    """The run with other bindings and options."""
    return lambda run, rng: run.start(*params, **options)


def _at(moment: str, *names: str, most: int = 1, delay: float = 0.0, stops: int = 0) -> Inject:
    """Signals after a moment has come once or up to `most` times, and up to `delay` seconds; the
    run stops after so many steps."""

    def inject(run: Run, rng: random.Random) -> Job:
        fault = ("signals", moment, rng.randint(1, most), rng.uniform(0, delay), *names)
        texts = [f"at step {run.newest + stops}, checkpoint saved"] if stops else ()
        return run.start(fault=fault, stop=6 if "USR" in names[0] else 99, texts=texts)

    return inject


def _killed(run: Run, moment: str, count: int, *params: str) -> None:
    fault = ("signals", moment, count, 0, "SIGKILL")
    run.start(*params, fault=fault, stop=99).end(-SIGKILL)


def _stopped(run: Run, step: int) -> Job:
    """The run stopped by SIGSTOP at a step."""
    job = run.start(fault=("signals", "step", step, 0, "SIGSTOP"), stop=99)
    stat = Path(f"/proc/{job.processes[0].pid}/stat")
    return job.wait(lambda: stat.read_text(errors="replace").rpartition(") ")[2].startswith("T"))


def _claim(run: Run, rng: random.Random) -> Job:
    """Killed before each file of a new run directory has its name, one after the other."""
    names = ["environment.json", "data.json", "config.gin", "config.json"]
    for count in range(1, 5):
        _killed(run, "claim", count)
        found = {path.name for path in run.path.glob("[!.]*")}
        if found != {"lock", *names[: count - 1]}:
            raise Broken(f"{run.path} has {found} when it is killed at file {count}")
    return run.start()


def _evaluations(run: Run) -> list[dict[str, float]]:
    return [x for x in read_metrics(run.path / METRICS) if "loss" not in x]


def _next_evaluation(run: Run) -> tuple[int, list[str]]:
    """(the next step after which nothing is saved, parameters that evaluate it)."""
    step = run.newest + 2
    step += not step % run.every
    params = "evaluations=(@Perplexity(),)", f"evaluate_every={step}"
    return step, ["Perplexity.max_rows=2", *(f"RunConfig.{x}" for x in params)]


def _stopped_in_evaluation(run: Run, rng: random.Random) -> Job:
    step, params = _next_evaluation(run)
    texts, fault = [f"at step {step + 1}, checkpoint saved"], ("evaluation", 1, 0, "SIGTERM")
    return run.start(*params, fault=("signals", *fault), stop=99, texts=texts)


def _killed_after_evaluation(run: Run, rng: random.Random) -> Job:
    """Killed between an evaluation and the next save: both are repeated."""
    (step, params), before = _next_evaluation(run), _evaluations(run)
    _killed(run, "step", step - run.newest + 1, *params)
    *others, last = _evaluations(run)
    job = run.start(*params).wait()
    expected = [*before, last]  # and later ones, if the run goes on beyond the next
    if others != before or last["step"] != step or _evaluations(run)[: len(expected)] != expected:
        raise Broken(f"evaluations {_evaluations(run)} do not begin with {expected}")
    return job


def _saved(run: Run, rng: random.Random) -> Job:
    """SIGUSR1 to one process saves in all, soon, and nothing ends."""
    start, number = run.newest, run.processes - 1
    # Not where a checkpoint is due: it would be the one that was asked for.
    count = next(n for n in range(rng.randint(1, 3), 9) if (start + n) % run.every in (1, 2))
    fault = ("signals", "step", count, 0, "SIGUSR1")
    job = run.start(fault=fault, victims=[number], stop=count + 3 + 2 * number).wait()
    # The metrics of a step are reported while the next one runs; several agree two steps ahead.
    if (step := start + count + 1 + 2 * number) not in run.steps(""):
        raise Broken(f"no checkpoint {step} among {run.steps('')}: {job.logs[0]}")
    written = {path.name for path in (run.checkpoints / str(step) / "params").glob("ocdbt.*")}
    if written != {f"ocdbt.process_{i}" for i in range(run.processes)}:
        raise Broken(f"checkpoint {step} has {written}: {job.logs[0]}")
    return job


def _small_files(run: Run, rng: random.Random) -> Job:
    size = rng.choice((100, 1000, 4000, 20_000))
    return run.start(fault=("full_disk", size), texts=["^error: "])


@contextmanager
def _mounted(path: Path, *options: str | Path) -> Iterator[None]:
    path.mkdir(exist_ok=True)
    if os.geteuid() or subprocess.run(["mount", *options, path], check=False).returncode:
        raise Unavailable("mounts no disk")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def _filled(run: Run, rng: random.Random) -> Job:
    """A disk of 8 MB fills up between two steps; with room again the run goes on."""
    with _mounted(run.path, "-t", "tmpfs", "-o", "size=8m", "tmpfs"):
        job, filler = _stopped(run, 5), run.path / "filler"
        with suppress(OSError), open(filler, "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        job.processes[0].send_signal(SIGCONT)
        job.texts = (r" was not saved: No space left on device \(it needs about ",)
        job.end(6)
        *warnings, _ = [x for x in job.text().splitlines() if "No space left on device" in x]
        if len(warnings) > 2 or not all("cannot be written" in x for x in warnings):
            raise Broken(f"warnings {warnings} in {job.logs[0]}")
        filler.unlink()
        job = run.start().wait()
        shutil.copytree(run.path, aside := run.folder / "aside")
    run.path.rmdir()
    aside.replace(run.path)
    return job


def _read_only(run: Run, rng: random.Random) -> Job:
    with _mounted(run.path, "--bind", "-o", "ro", run.path):
        text = r"^error: .* cannot be a run directory \(Read-only file system\): choose"
        return run.start(texts=[text]).wait()


def _second_trainer(run: Run, rng: random.Random) -> Job:
    job = _stopped(run, 2)
    owner = f"process {job.processes[0].pid} on "
    run.start(texts=[f"^error: .* is in use by {owner}"]).end(2)
    job.processes[0].send_signal(SIGCONT)
    job.processes[0].send_signal(SIGTERM)
    return job


def _evaluated(run: Run, rng: random.Random) -> Job:
    evaluate, job = run.evaluation(), run.start()
    evaluate.end(0)
    return job


def _without_terminal(run: Run, rng: random.Random) -> Job:
    """The terminal hangs up, and nobody reads the output."""
    reader, terminal = os.pipe()
    os.close(reader)
    fault = ("signals", "step", 3, 0, "SIGHUP", "SIGHUP")
    texts = [r"\A.*standard output cannot be written.*\n\Z"]
    job = run.start(fault=fault, stdout=terminal, texts=texts)
    os.close(terminal)
    return job


def _full_output(run: Run, rng: random.Random) -> Job:
    with open("/dev/full", "w") as full:
        return run.start(stdout=full.fileno())


def _fails(status: int, error: str, text: str, end: str) -> Fault:
    """An error in a step, which a note with the last good checkpoint follows."""

    def inject(run: Run, rng: random.Random) -> Job:
        job = run.start(fault=("fails", 5, error, text)).wait()
        job.texts = [rf"^error: .*{end}\n\Z".format(run.newest)]
        return job

    return Fault(inject, (status,))


def _two(moment: str, name: str, last: str, *, most: int = 1, victim: int | None = None) -> Fault:
    """One of two processes is killed or stopped; the other ends with such a last line."""

    def inject(run: Run, rng: random.Random) -> Job:
        number, count = rng.randrange(2) if victim is None else victim, rng.randint(1, most)
        if moment == "step" and name == "SIGSTOP":  # not in a save, in which the watchdog waits
            count = 4 + (1 - run.newest) % run.every
        job = run.start(fault=("signals", moment, count, 0, name), victims=[number], stop=99)
        job.wait(number=1 - number)
        job.processes[number].send_signal(SIGKILL)
        job.statuses = [(7,), (7,)]
        job.statuses[number] = (-SIGKILL,)
        found = job.text(1 - number).rstrip().rpartition("\n")[2]
        if not re.match(rf"error: {last}.*; restart the job, it goes on from its last", found):
            raise Broken(f"{found!r} ends {job.logs[1 - number]}")
        return job

    return Fault(inject, processes=2)


def _both(statuses: Sequence[int], *fault: object, victims: Sequence[int] = (0, 1)) -> Fault:
    """A fault in one of two processes or in both."""

    def inject(run: Run, rng: random.Random) -> Job:
        job = run.start(fault=fault, victims=victims)
        job.statuses = [(status,) for status in statuses]
        return job

    return Fault(inject, processes=2)


def _locked(run: Run, rng: random.Random) -> Job:
    """The run directory is in use: the first process says so, the other loses it."""
    with (run.path / "lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        job = run.start(texts=["^error: .* is in use by"]).wait()
    job.statuses = [(2,), (7,)]
    return job


def _damaged(damage: Damage, is_evaluated: bool = False) -> Fault:
    """Damages a file of the newest checkpoint: it is named, and the one before is used."""

    def inject(run: Run, rng: random.Random) -> Job:
        *_, older, newest = run.steps()
        files = sorted((run.checkpoints / str(newest)).rglob("*"))
        path = rng.choice([x for x in files if x.is_file() and x.stat().st_size])
        damage(path, rng)
        if is_evaluated:
            texts = re.escape(path.name), rf"\(step {older}, 2 rows\)"
            run.evaluation(texts=texts).end(0)
            text = rf"^error: checkpoint step {newest} is damaged.*step={older}"
            run.evaluation(f"--step={newest}", texts=[text]).end(4)
        job = run.start(texts=[rf"step {newest} \(", re.escape(path.name)])
        job.resumed = older
        return job

    return Fault(inject, checkpoints=2)


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(max(path.stat().st_size - 1, 1))])


def _emptied(path: Path, rng: random.Random) -> None:
    for child in path.iterdir():
        shutil.rmtree(child)


def _no_digests(run: Run, rng: random.Random) -> Job:
    for path in run.checkpoints.glob("*/DIGEST.json"):
        path.unlink()
    return run.start(texts=[f"step {run.newest} in ", "is used unchecked"])


def _torn_metrics(run: Run, rng: random.Random) -> Job:
    """Lines that are none: at the end, and after the first step."""
    tails = b'{"step": 99, "lo\xff\n', bytes(300) + b"\n", b"[]\n3\n{}\n", b'{"step": 9' + bytes(9)
    tail = rng.choice(tails)
    path = run.path / METRICS
    first, _, rest = path.read_bytes().partition(b"\n")
    path.write_bytes(first + b"\n" + tail.rstrip(b"\n") + b"\n" + rest + tail)
    return run.start(texts=[f"{2 * max(tail.count(10), 1)} of "])


def _leftovers(run: Run, rng: random.Random) -> Job:
    step = run.steps()[-1] + rng.randint(1, 8)
    (run.checkpoints / f"{step}.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (run.path / f".{name}.99999").write_text("{")
    return run.start()


def _refused(find: Callable[[Run], Iterable[Path]], damage: Damage, *texts: str) -> Inject:
    """Damages a file or folder, is refused, and restores it."""

    def inject(run: Run, rng: random.Random) -> Job:
        path, aside = rng.choice(sorted(find(run))), run.folder / "aside"
        metrics = (run.path / METRICS).read_bytes() if (run.path / METRICS).exists() else b""
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, aside)
        damage(path, rng)
        job = run.start(texts=["^error: ", *texts]).wait()
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        aside.replace(path)
        if metrics and (run.path / METRICS).read_bytes() != metrics:
            raise Broken(f"a launch that is refused changed the metrics of {run.path}")
        return job

    return inject


def _lost(damage: Damage) -> Fault:
    texts = r"metrics\.jsonl reports \d+ steps and ", "holds no checkpoint: restore a copy, or "
    return Fault(_refused(lambda run: [run.checkpoints], damage, *texts), (4,), checkpoints=3)


def _resized(run: Run, rng: random.Random) -> Job:
    """One process, four, two: the first two jobs are killed after they saved."""
    noted, victims = run.folder / f"{run.path.name}.rows.log", range(4)
    note = {"fault": ("notes_rows", str(noted)), "victims": victims}
    for processes in (0, 4):  # 0: its own number, one, in its own layout
        job, start = run.start(**note, processes=processes, stop=99), run.newest
        job.wait(lambda start=start: run.newest > start)
        time.sleep(rng.uniform(0, 0.1))
        for process in job.processes:
            process.send_signal(SIGKILL)
        job.end(-SIGKILL, PEER_LOST)
    job = run.start(**note, processes=2)
    job.end(STOPPED)
    check_rows(run, noted)
    return job


def _rarely_saved(run: Run, rng: random.Random) -> Job:
    """Killed before its first checkpoint, the run goes on with more of them."""
    run.every = 1000
    _killed(run, "step", 9)
    run.every = 4
    return run.start(flags=("--change=RunConfig.checkpoint_every",))


def _records_moved(run: Run, rng: random.Random) -> Job:
    run.records = run.folder / f"records-{rng.randrange(4)}"
    shutil.copytree(run.folder / "records", run.records, dirs_exist_ok=True)
    return run.start()


_KILLED, _DATA = (-SIGKILL,), "ttcd_jax.errors:DataError"
_GOES_ON = "; last good checkpoint: step {}; the same command goes on"
_RUNTIME, _CHECKPOINT = "builtins:RuntimeError", "ttcd_jax.errors:CheckpointError"
_INTERNAL = "INTERNAL: Out of memory allocating 64 bytes"
_MESH = "RunConfig.mesh=@MeshConfig()"
_LOST, _LATE = "another process was lost", "no step for "
# Those of one process that keep its layout come last: the suite compares their run to its end.
FAULTS = {
    "two, SIGUSR1 and SIGTERM to one": Fault(_saved, keep=9, processes=2),
    "two, Ctrl-C to both": _both((STOPPED, STOPPED), "signals", "step", 5, 0, "SIGINT"),
    "two, kill -9 of one": _two("step", "SIGKILL", f"({_LOST}|{_LATE})", most=4),
    "two, kill -9 of one in a save": _two("save", "SIGKILL", _LOST),
    "two, kill -9 of both in a save": _both((-9, -9), "signals", "save", 1, 0.01, "SIGKILL"),
    "two, kill -9 of the first in compilation": _two("compilation", "SIGKILL", _LOST, victim=0),
    "two, SIGSTOP of one": _two("step", "SIGSTOP", _LATE, most=4),
    "two, SIGSTOP of one in compilation": _two("compilation", "SIGSTOP", _LOST, victim=1),
    "two, an error of one": _both((7, 3), "fails", 5, _DATA, "a.txt has gone", victims=(1,)),
    "two, an error of both": _both((3, 3), "fails", 5, _DATA, "a.txt has gone"),
    "two, a directory in use": Fault(_locked, checkpoints=1, processes=2),
    "one, four, two": Fault(_resized),
    "four devices": Fault(_started(_MESH, "MeshConfig.data=2", "MeshConfig.seq=2", devices=4)),
    "two devices": Fault(_started(_MESH, "MeshConfig.tensor=2", devices=2)),
    "four parts": Fault(_started("RunConfig.accumulation_steps=4")),
    "kill -9 before any checkpoint": Fault(_rarely_saved, is_new=True, keep=1),
    "evaluation alongside": Fault(_evaluated, checkpoints=1, keep=1),
    "a full disk": Fault(_filled, is_new=True),
    "kill -9 in the claim": Fault(_claim, is_new=True),
    "kill -9 at the start": Fault(_at("start", "SIGKILL"), _KILLED),
    "kill -9 in a restore": Fault(_at("restore", "SIGKILL", delay=0.1), _KILLED, checkpoints=1),
    "kill -9 in compilation": Fault(_at("compilation", "SIGKILL", delay=0.3), _KILLED),
    "kill -9 at a step": Fault(_at("step", "SIGKILL", most=4, delay=0.02), _KILLED),
    "kill -9 in a save": Fault(_at("save", "SIGKILL", delay=0.02), _KILLED),
    "kill -9 before a digest": Fault(_at("seal", "SIGKILL"), _KILLED),
    "kill -9 after an evaluation": Fault(_killed_after_evaluation),
    "SIGTERM at the start": Fault(_at("start", "SIGTERM"), (-SIGTERM,)),
    "SIGTERM in compilation": Fault(_at("compilation", "SIGTERM", stops=1)),
    "SIGTERM in a restore": Fault(_at("restore", "SIGTERM", stops=1), checkpoints=1),
    "SIGTERM at a step": Fault(_at("step", "SIGTERM", most=4, delay=0.02)),
    "SIGTERM in an evaluation": Fault(_stopped_in_evaluation),
    "SIGTERM in a save": Fault(_at("save", "SIGTERM", delay=0.02)),
    "SIGTERM before a digest": Fault(_at("seal", "SIGTERM")),
    "SIGINT": Fault(_at("step", "SIGINT", most=4)),
    "SIGHUP twice": Fault(_at("step", "SIGHUP", "SIGHUP", most=4)),
    "SIGINT twice": Fault(_at("step", "SIGINT", "SIGINT", most=4), (-2, STOPPED, 130)),
    "SIGUSR1 at the start": Fault(_at("start", "SIGUSR1")),
    "SIGUSR2 at the start": Fault(_at("start", "SIGUSR2")),
    "SIGUSR1": Fault(_saved, keep=3),
    "the clock jumps": Fault(  # the time limit of an Orbax save is passed
        lambda run, rng: run.start(fault=("clock", rng.randrange(999))), (STOPPED, 4)
    ),
    "files that cannot grow": Fault(_small_files, (6,)),
    "a read-only disk": Fault(_read_only, (2,), checkpoints=1),
    "a second trainer": Fault(_second_trainer),
    "the terminal hangs up": Fault(_without_terminal),
    "output on a full disk": Fault(_full_output),
    "an error of the data": _fails(3, _DATA, "a.txt has gone", _GOES_ON),
    "an error of memory, RESOURCE": _fails(6, _RUNTIME, "RESOURCE_EXHAUSTED: no memory", _GOES_ON),
    "an error of memory, INTERNAL": _fails(6, _RUNTIME, _INTERNAL, _GOES_ON),
    "an error of a checkpoint": _fails(4, _CHECKPOINT, "none is intact", "none is intact"),
    "checkpoint: a bit": _damaged(_flip, is_evaluated=True),
    "checkpoint: cut": _damaged(_cut),
    "checkpoint: a file lost": _damaged(lambda path, rng: path.unlink()),
    "checkpoints: no digests": Fault(_no_digests, checkpoints=2),
    "checkpoints: all lost": _lost(_emptied),
    "checkpoints: folder lost": _lost(lambda path, rng: shutil.rmtree(path)),
    "metrics.jsonl: torn": Fault(_torn_metrics, checkpoints=1),
    "unfinished files": Fault(_leftovers, checkpoints=1),
    "config or data.json: cut": Fault(
        _refused(lambda run: [run.path / f"{x}.json" for x in ("config", "data")], _cut),
        (2, 3),
        checkpoints=1,
    ),
    "records: moved": Fault(_records_moved, checkpoints=1),
    "records: a bit": Fault(_refused(lambda run: run.records.glob("train.*"), _flip), (3,)),
}
