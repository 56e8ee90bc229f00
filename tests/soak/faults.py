"""The table of faults: each starts a process of the run, and injects itself before or meanwhile."""

import random
import resource
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from signal import SIGCONT, SIGHUP, SIGINT, SIGKILL, SIGSTOP, SIGTERM
from typing import NamedTuple

from tests.soak.run import STEPS, STOPPED, Child, Run, text_of

_MIN_LEFT = 20  # steps of a run, for another fault

Inject = Callable[[Run, random.Random], Child]


class Fault(NamedTuple):
    """`inject` returns the process, which is stopped some steps later if it still runs then, and
    ends with one of `statuses`. The run has `checkpoints` before, or is new, or keeps `keep`."""

    inject: Inject
    statuses: tuple[int, ...] = (STOPPED,)
    checkpoints: int = 0
    is_new: bool = False
    keep: int | None = None


def drawn(kinds: Sequence[str], seed: int, number: int) -> tuple[str, random.Random]:
    """The kind of a fault and its random numbers, from the seed and its number alone: every kind
    comes once before one comes again."""
    turn, place = divmod(number, len(kinds))
    order = random.Random(f"{seed} {turn}").sample(kinds, len(kinds))
    return order[place], random.Random(f"{seed}:{number}")


def is_possible(fault: Fault, run: Run) -> bool:
    """Whether the run has steps left, and the fault needs no other one."""
    is_long = max(run.steps(""), default=0) <= STEPS - _MIN_LEFT
    keeps = fault.keep in (None, run.keep) and fault.checkpoints <= run.keep
    return is_long and keeps and not fault.is_new


def inject(fault: Fault, run: Run, rng: random.Random) -> int | None:
    """The exit status of the process that was hit. Raises `Broken` for another than expected."""
    run.make_ready(fault.checkpoints)
    child, more = fault.inject(run, rng), rng.randint(4, 10)
    before = child.num_steps
    if child.runs_until(lambda: child.num_steps >= before + more):
        child.send(SIGTERM)
    run.end(child, *fault.statuses, 0)
    return child.status


# The longest time from a moment to its signals, and whether it has come, after so many steps.
_MOMENTS: dict[str, tuple[float, Callable[[Run, Child, int], object]]] = {
    "start": (1.5, lambda run, child, steps: True),
    "claim": (0.01, lambda run, child, steps: any(run.path.glob("*.*"))),
    "restore": (0.5, lambda run, child, steps: _is_locked(run, child)),
    "compile": (0.5, lambda run, child, steps: "run directory" in child.text),
    "step": (0.03, lambda run, child, steps: child.num_steps >= steps),
    "save": (0.03, lambda run, child, steps: child.num_steps and _is_saving(run)),
    "seal": (0.0, lambda run, child, steps: run.steps() != run.steps("")),
}


def _is_saving(run: Run) -> bool:
    return any(run.checkpoints.glob("*-tmp*"))


def _is_locked(run: Run, child: Child) -> bool:
    return text_of(run.path / "lock").startswith(f"process {child.pid} ")


def _signals(moment: str, *numbers: int) -> Inject:
    """Sends signals soon after a moment."""
    longest, has_come = _MOMENTS[moment]

    def inject(run: Run, rng: random.Random) -> Child:
        steps, delay = rng.randint(1, 8), rng.uniform(0, longest)
        child = run.start()
        if child.runs_until(lambda: has_come(run, child, steps)):
            time.sleep(delay)
            child.send(*numbers)
        return child

    return inject


def _pause(run: Run, rng: random.Random) -> Child:
    child = _signals("step", SIGSTOP)(run, rng)
    time.sleep(rng.uniform(0.1, 1))
    child.send(SIGCONT)
    return child


def _clock(run: Run, rng: random.Random) -> Child:
    def jump() -> None:
        now = time.time
        time.time = lambda: now() + rng.uniform(-1e5, 1e5)

    return run.start(before=jump)


def _full_disk(run: Run, rng: random.Random) -> Child:
    limit = rng.choice((100, 1000, 4000, 20_000))
    return run.start(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))


def _second_trainer(run: Run, rng: random.Random) -> Child:
    child = _signals("step")(run, rng)
    child.send(SIGSTOP)  # so that it does not end before
    other = run.start()
    other.texts = ("is in use by process ",)
    other.end(2)
    child.send(SIGCONT)
    return child


def _evaluated(run: Run, rng: random.Random) -> Child:
    evaluate = run.evaluation()
    child = run.start()
    evaluate.end(0)
    return child


def _two(numbers: tuple[int, ...], *statuses: int) -> Inject:
    """Two processes: one receives signals, the other ends with one of `statuses`."""

    def inject(run: Run, rng: random.Random) -> Child:
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        children = [
            run.start(flags=(f"--distributed=localhost:{port},2,{i}", "--hang_seconds=5"))
            for i in (0, 1)
        ]
        steps, victim = rng.randint(1, 8), rng.choice(children)
        (survivor,) = (child for child in children if child is not victim)

        def has_come() -> bool:
            # A save waits 100 s for a stopped process, so it is stopped between two saves.
            return children[0].num_steps >= steps and children[0].last_step % 4 == 1

        if survivor.runs_until(has_come):
            victim.send(*numbers)
        run.end(survivor, *statuses, 0)
        victim.send(SIGKILL if SIGSTOP in numbers else 0)
        return victim

    return inject


def _moved(devices: int, *params: str) -> Inject:
    bindings = ("RunConfig.mesh=@MeshConfig()", *params) if "Mesh" in "".join(params) else params
    return lambda run, rng: run.start(*bindings, devices=devices)


def _damaged(damage: Callable[[Path, random.Random], object]) -> Inject:
    """Damages a file of the newest checkpoint: it is named, and the one before is used."""

    def inject(run: Run, rng: random.Random) -> Child:
        *_, older, newest = run.steps()
        files = sorted(x for x in (run.checkpoints / str(newest)).rglob("*") if x.is_file())
        damage(rng.choice([x for x in files if x.stat().st_size]), rng)
        child = run.start()
        child.texts = (f"step {newest} (", f"resumed at step {older}\n")
        return child

    return inject


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _cut(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: rng.randrange(max(path.stat().st_size - 1, 1))])


def _no_digests(run: Run, rng: random.Random) -> Child:
    newest = run.steps()[-1]
    for path in run.checkpoints.glob("*/DIGEST.json"):
        path.unlink()
    child = run.start()
    child.texts = (f"step {newest} in ", "is used unchecked", f"resumed at step {newest}\n")
    return child


def _torn_metrics(run: Run, rng: random.Random) -> Child:
    tails = (b'{"step": 99, "lo', bytes(300), b'{"step": 9' + bytes(99) + b"\n", b"\xff\n")
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(rng.choice(tails))
    return run.start()


def _leftovers(run: Run, rng: random.Random) -> Child:
    step = run.steps()[-1] + rng.randint(1, 8)
    (run.checkpoints / f"{step}.orbax-checkpoint-tmp" / "params").mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (run.path / f".{name}.99999").write_text("{")
    return run.start()


def _refused(
    find: Callable[[Run], Iterable[Path]], damage: Callable[[Path, random.Random], object]
) -> Inject:
    """Damages a file or folder, is refused, and restores it."""

    def inject(run: Run, rng: random.Random) -> Child:
        path, aside = rng.choice(sorted(find(run))), run.folder / "aside"
        (shutil.copytree if path.is_dir() else shutil.copy2)(path, aside)
        damage(path, rng)
        child = run.start()
        child.texts = ("error: ",)
        try:
            child.runs_until(lambda: child.num_steps)
        finally:
            if path.is_dir():
                shutil.rmtree(path)
            aside.replace(path)
        return child

    return inject


def _records_moved(run: Run, rng: random.Random) -> Child:
    run.records = run.folder / f"records-{rng.randrange(4)}"
    shutil.copytree(run.folder / "records", run.records, dirs_exist_ok=True)
    return run.start()


_KILLED = (-SIGKILL,)
FAULTS = {
    "kill -9 at the start": Fault(_signals("start", SIGKILL), _KILLED),
    "kill -9 in the claim": Fault(_signals("claim", SIGKILL), _KILLED, is_new=True),
    "kill -9 in a restore": Fault(_signals("restore", SIGKILL), _KILLED, checkpoints=1),
    "kill -9 in compilation": Fault(_signals("compile", SIGKILL), _KILLED),
    "kill -9 at a step": Fault(_signals("step", SIGKILL), _KILLED),
    "kill -9 in a save": Fault(_signals("save", SIGKILL), _KILLED),
    "kill -9 before a digest": Fault(_signals("seal", SIGKILL), _KILLED),
    "SIGTERM at the start": Fault(_signals("start", SIGTERM), (-SIGTERM, STOPPED)),
    "SIGTERM in compilation": Fault(_signals("compile", SIGTERM)),
    "SIGTERM in a save": Fault(_signals("save", SIGTERM)),
    "SIGINT": Fault(_signals("step", SIGINT)),
    "SIGHUP twice": Fault(_signals("step", SIGHUP, SIGHUP)),
    "SIGINT twice": Fault(_signals("step", SIGINT, SIGINT), (-SIGINT, STOPPED, 130)),
    "SIGSTOP for a while": Fault(_pause),
    "the clock jumps": Fault(_clock, (STOPPED, 4)),  # the time limit of an Orbax save is passed
    "a full disk": Fault(_full_disk, (6,)),
    "a second trainer": Fault(_second_trainer),
    "evaluation alongside": Fault(_evaluated, checkpoints=1, keep=1),
    "two processes, SIGTERM": Fault(_two((SIGTERM,), STOPPED)),
    "two processes, kill -9": Fault(_two((SIGKILL,), 7, -6), _KILLED),
    "two processes, SIGSTOP": Fault(_two((SIGSTOP,), 7, -6), _KILLED),
    "two devices": Fault(_moved(2)),
    "four devices, data 2": Fault(_moved(4, "MeshConfig.data=2")),
    "four devices, seq 2": Fault(_moved(4, "MeshConfig.seq=2")),
    "two devices, tensor 2": Fault(_moved(2, "MeshConfig.tensor=2")),
    "four parts": Fault(_moved(1, "RunConfig.accumulation_steps=4")),
    "checkpoint: a bit": Fault(_damaged(_flip), checkpoints=2),
    "checkpoint: cut": Fault(_damaged(_cut), checkpoints=2),
    "checkpoint: a file lost": Fault(_damaged(lambda path, rng: path.unlink()), checkpoints=2),
    "checkpoints: no digests": Fault(_no_digests, checkpoints=2),
    "checkpoints: all lost": Fault(
        _refused(
            lambda run: [run.checkpoints], lambda path, _: list(map(shutil.rmtree, path.iterdir()))
        ),
        (4,),
        checkpoints=3,
    ),
    "metrics.jsonl: torn": Fault(_torn_metrics, checkpoints=1),
    "unfinished files": Fault(_leftovers, checkpoints=1),
    "records: moved": Fault(_records_moved, checkpoints=1),
    "records: a bit": Fault(_refused(lambda run: run.records.glob("train.*"), _flip), (3,)),
    "config or data.json: cut": Fault(
        _refused(lambda run: [run.path / f"{x}.json" for x in ("config", "data")], _cut),
        (2, 3),
        checkpoints=1,
    ),
}
