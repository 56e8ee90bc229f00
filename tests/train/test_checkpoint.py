"""Checkpoints: exact round trips, and damage that is noticed, named and survived."""

import contextlib
import functools
import itertools
import os
import shutil
from logging import getLogger
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from absl import logging
from checks import assert_same, files_of_at_most, refused
from damage import flip

from ttcd_jax.errors import CheckpointError, ResourceError
from ttcd_jax.train import checkpoint, digest
from ttcd_jax.train.checkpoint import Checkpoints, Kept
from ttcd_jax.train.state import placed_as


def _state(step: int, width: int = 5) -> dict:
    params = {
        "embed": {"weight": jnp.arange(3 * width, dtype=jnp.bfloat16).reshape(3, width) * step},
        "blocks": {"0": {"norm": jnp.full((width,), 1 / step), "ids": jnp.int32([step, -step])}},
    }
    optimizer = optax.chain(optax.clip(1.0), optax.adamw(1e-3))
    moments = jax.tree.map(lambda leaf: (leaf + step).astype(leaf.dtype), optimizer.init(params))
    return {"step": jnp.int32(step), "params": params, "opt_state": moments}


ABSTRACT = jax.eval_shape(lambda: _state(1))


def _opened(directory, **options):
    return contextlib.closing(Checkpoints(directory, **options))


def _save(checkpoints, *steps):
    for step in steps:
        checkpoints.save(step, _state(step))
    checkpoints.wait()


def _restored(directory, step=None, abstract=ABSTRACT, **options):
    with _opened(directory, **options) as checkpoints:
        return checkpoints.restore(abstract, step)


def _names(folder):
    return sorted(path.name for path in folder.iterdir())


_refused = functools.partial(refused, error=CheckpointError)
_assert_equal = functools.partial(assert_same, strict=True)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """A run directory with the sealed steps 1, 2 and 3; copied, never changed."""
    directory = tmp_path_factory.mktemp("pristine") / "checkpoints"
    with _opened(directory) as checkpoints:
        _save(checkpoints, 1, 2, 3)
    return directory


@pytest.fixture
def saved(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "checkpoints")


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def _empty(file):
    file.write_bytes(b"")


DAMAGES = (flip, _truncate, _empty, os.remove)


def _named(saved, path):
    """The file or folder of "3/params/_METADATA"; of "3/params" the largest file."""
    if path.partition("/")[2] not in ("params", "train"):
        return saved / path
    files = (saved / path / "ocdbt.process_0" / "d").iterdir()
    return max(files, key=lambda file: file.stat().st_size)


def test_round_trip_is_exact_and_restored_where_asked(saved, caplog):
    for step in (None, 1):
        found, state = _restored(saved, step)
        assert found == (step or 3)
        _assert_equal(state, _state(found))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    abstract = placed_as(ABSTRACT, jax.tree.map(lambda _: sharding, ABSTRACT))
    state = _restored(saved, abstract=abstract, is_read_only=True)[1]
    assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(state))
    shutil.rmtree(saved / "3" / "train")  # parameters alone do not touch it
    digest.seal(saved / "3")
    found = _restored(saved, abstract={"params": ABSTRACT["params"]}, is_read_only=True)
    assert found[0] == 3
    _assert_equal(found[1], {"params": _state(3)["params"]})
    assert caplog.messages == []


def test_steps_go_on_after_a_restart_also_when_the_job_is_stopped_and_the_newest_are_kept(
    saved, monkeypatch
):
    monkeypatch.setattr(ocp.CheckpointManager, "reached_preemption", lambda self, step: True)
    shutil.copytree(saved / "3", saved / "9.orbax-checkpoint-tmp")
    with _opened(saved, kept=Kept(2)) as checkpoints:
        _save(checkpoints, 4)
        assert checkpoints.steps() == [3, 4]
        _assert_equal(checkpoints.restore(ABSTRACT)[1], _state(4))
    assert _names(saved) == ["3", "4"]
    assert digest.verify(saved / "4") == []


def test_donated_arrays_are_saved_as_they_were(tmp_path):
    advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    state = {"params": {"w": jnp.zeros(1_000_000)}}
    abstract = jax.eval_shape(lambda: state)
    with _opened(tmp_path / "run") as checkpoints:
        for step in range(3):
            checkpoints.save(step, state)
            for _ in range(5):
                state = advance(state)
        for step in range(3):
            restored = checkpoints.restore(abstract, step)[1]["params"]["w"]
            assert np.unique(np.asarray(restored)).tolist() == [5.0 * step]


def test_every_damage_to_every_file_is_noticed_and_named(pristine, tmp_path):
    files = sorted(file for file in (pristine / "3").rglob("*") if file.is_file())
    for name, damage in itertools.product((x.relative_to(pristine / "3") for x in files), DAMAGES):
        step_dir = shutil.copytree(pristine / "3", tmp_path / "3")
        damage(step_dir / name)
        problems = digest.verify(step_dir)
        assert problems, f"{damage.__name__} of {name} went unnoticed"
        if name.name != digest.DIGEST:
            assert problems[0].startswith(f"{name}: "), problems
        shutil.rmtree(step_dir)
    step_dir = shutil.copytree(pristine / "2", tmp_path / "2")
    (step_dir / "params" / "extra").write_text("x")
    assert digest.verify(step_dir) == ["params/extra: added"]


@pytest.mark.parametrize(
    ("item", "damage"),
    [("params", flip), ("train", _truncate), ("params/_METADATA", _empty), ("train", os.remove)],
)
def test_damaged_newest_step_falls_back(saved, caplog, damage, item):
    damage(file := _named(saved, f"3/{item}"))
    with _opened(saved) as checkpoints:
        step, state = checkpoints.restore(ABSTRACT)
        assert step == 2
        _assert_equal(state, _state(2))
        (line,) = caplog.messages
        assert f"step 3 ({file.relative_to(saved / '3')}: " in line
        assert "using step 2" in line
        _save(checkpoints, 3)
        assert checkpoints.steps() == [1, 2, 3]
        assert checkpoints.restore(ABSTRACT)[0] == 3
    assert (saved / "3.refused").is_dir()


def test_refused_steps_stay_until_the_next_refusal_and_a_reader_touches_nothing(saved, caplog):
    flip(_named(saved, "3/params"))
    before = sorted(saved.rglob("*"))
    with _opened(saved, is_read_only=True) as checkpoints:
        assert checkpoints.restore({"params": ABSTRACT["params"]})[0] == 2
        _refused("step 9 was not saved: |opened read-only", checkpoints.save, 9, _state(9))
    assert sorted(saved.rglob("*")) == before
    assert len(caplog.messages) == 1
    for step in (3, 2):
        assert _restored(saved)[0] == step - 1
        assert [path.name for path in saved.glob("*.refused")] == [f"{step}.refused"]
        if step == 3:
            flip(_named(saved, "2/params"))


SEAL = digest.DIGEST


@pytest.mark.parametrize(
    ("removed", "step", "found", "words"),
    [
        (["3/" + SEAL], 3, 3, "step 3 in"),
        (["3/" + SEAL], None, 2, "step 3 (DIGEST.json: missing); using step 2"),
        (["1", "2", "3/" + SEAL], None, 3, "step 3 in|used unchecked"),
        # While the step before was deleted.
        (["1", "2/_CHECKPOINT_METADATA", "3/" + SEAL], None, 3, "checkpoint step 3 |unchecked"),
    ],
)
def test_killed_before_the_seal(saved, caplog, removed, step, found, words):
    """The sealed step before goes on, or the only one, unchecked."""
    for path in removed:
        (shutil.rmtree if (saved / path).is_dir() else os.remove)(saved / path)
    restored = _restored(saved, step)
    assert restored[0] == found
    _assert_equal(restored[1], _state(found))
    assert any(all(word in line for word in words.split("|")) for line in caplog.messages)


ALL = "|".join(f"step {step} (params/_METADATA: " for step in (1, 2, 3))


@pytest.mark.parametrize(
    ("damages", "step", "words"),
    [
        ({"3/params": flip, "2/train/_METADATA": os.remove}, 3, "3 is damaged: |changed|step=1"),
        (dict.fromkeys([f"{i}/params/_METADATA" for i in (1, 2, 3)], _truncate), None, ALL),
        ({"1/params/_METADATA": _truncate}, 1, "step 1 is damaged: |no intact step precedes"),
        *(
            ({f"3/{name}": damage, "3/" + SEAL: os.remove}, 3, "cannot be read: |; pass step=2")
            for name in ("params/_METADATA", "params/_sharding", "train/_sharding")
            for damage in (flip, _truncate, _empty)
        ),
    ],
)
def test_damage_is_refused_with_the_file_and_the_last_intact_step(saved, damages, step, words):
    names = []
    for path, damage in damages.items():
        damage(file := _named(saved, path))
        names.append(f"{file.relative_to(saved / path[0])}")
    message = _refused(words, _restored, saved, step)
    assert digest.DIGEST in names or names[0] in message
    assert _names(saved) == ["1", "2", "3"]


def test_an_unsealed_step_that_cannot_be_read_gives_way_to_the_one_before(
    saved, caplog, monkeypatch
):
    for step in ("1", "2", "3"):
        os.remove(saved / step / digest.DIGEST)
    restore = ocp.CheckpointManager.restore

    def raised(self, step, **options):
        if step == 3:
            raise Exception("Encountered error while reading array index")  # as Orbax does
        return restore(self, step, **options)

    monkeypatch.setattr(ocp.CheckpointManager, "restore", raised)
    assert _restored(saved, is_read_only=True)[0] == 2
    assert "step 3 (cannot be read: Exception: Encountered error " in caplog.messages[-1]


def test_paths_that_orbax_takes_for_patterns_are_refused_and_others_read_back(
    tmp_path, monkeypatch
):
    for name in ("run[1]", "sweep[lr]/a", "[ab]*?"):
        refused("could not be read back|brackets of|[", Checkpoints, tmp_path / name)
    for name in ("run*", "what?", "seed[0-3", "x]y"):
        with _opened(tmp_path / name) as checkpoints:
            checkpoints.save(1, _state(1))
            assert checkpoints.restore(ABSTRACT)[0] == 1
    # Unchecked, such a step is not sealed, as it cannot be opened.
    monkeypatch.setattr(checkpoint, "check_directory", lambda directory: None)
    with _opened(tmp_path / "run[1]") as checkpoints:
        checkpoints.save(1, _state(1))
        _refused("step 1 was not saved: |NOT_FOUND", checkpoints.wait)
    assert not digest.is_sealed(tmp_path / "run[1]" / "1")


def test_another_model_is_described(saved):
    weight = jax.ShapeDtypeStruct((3, 6), jnp.bfloat16)
    norm = jax.ShapeDtypeStruct((5,), jnp.bfloat16)
    extra = {f"extra{i}": norm for i in range(6)}
    params = {"embed": {"weight": weight}, "blocks": {"0": {"norm": norm, **extra}}}
    parts = (
        "6 only in the model: params/blocks/0/extra0, ",
        "extra3, and 2 more; 1 only in the checkpoint: params/blocks/0/ids; ",
        "1 saved with another shape: params/embed/weight (3, 5) not (3, 6); ",
        "1 saved with another dtype: params/blocks/0/norm float32 not bfloat16; ",
    )
    _refused("|".join(parts), _restored, saved, abstract=ABSTRACT | {"params": params})
    assert _names(saved) == ["1", "2", "3"]


def test_missing_and_wrong_places_and_steps_are_named(tmp_path, saved):
    _refused("there is no folder |nowhere", Checkpoints, tmp_path / "nowhere", is_read_only=True)
    (tmp_path / "file").write_text("")
    _refused("cannot hold checkpoints", Checkpoints, tmp_path / "file")
    _refused("there is no checkpoint in", _restored, tmp_path / "run")
    _refused("no checkpoint step 7 in|; steps: 1, 2, 3", _restored, saved, 7)
    with _opened(saved) as checkpoints:
        for step in (3, 2):
            words = f"step {step} was not saved: step 3 is already in"
            _refused(words, checkpoints.save, step, _state(step))
        checkpoints.save(4, _state(4))
        checkpoints.wait()
        shutil.rmtree(saved)
        saved.write_text("a file in its place")
        _refused("step 5 was not saved: ", checkpoints.save, 5, _state(5))


FULL = "step 4 was not saved|last good step: 3"


@pytest.mark.parametrize(("inodes", "words"), [(9, ""), (0, " and no inode")])
def test_full_disk_is_foreseen(saved, monkeypatch, inodes, words):
    usage = shutil.disk_usage(saved)._replace(free=100)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=9, f_favail=inodes))
    words = f"{FULL}|No space left on device (it needs about 3.81| has 100 bytes{words} free)"
    with _opened(saved) as checkpoints:
        state = {"params": {"w": jnp.ones(1_000_000)}}
        refused(words, checkpoints.save, 4, state, error=ResourceError)


def test_background_failure_surfaces_at_the_next_call(saved, capfd):
    noise = {"params": {"w": jax.random.normal(jax.random.key(0), (500_000,))}}
    with _opened(saved, kept=Kept(3)) as checkpoints:
        with files_of_at_most(200_000):
            checkpoints.save(4, noise)
            words = FULL + "|File too large (it needs about 1.91 MiB, "
            refused(words, checkpoints.save, 5, noise, error=ResourceError)
        checkpoints.save(6, noise)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3, 6]
        with files_of_at_most(100):  # of any file
            checkpoints.save(7, noise)
            refused("step 7 was not saved", checkpoints.wait, error=ResourceError)
    assert capfd.readouterr() == ("", "")


def test_a_step_that_its_run_deletes_while_it_is_read_is_looked_for_again(saved, monkeypatch):
    verify = digest.verify
    writer = Checkpoints(saved, kept=Kept(1))
    steps = iter(range(4, 100))

    def overtaken(step_dir):
        if (step := next(steps)) < last:
            _save(writer, step)
        return verify(step_dir)

    monkeypatch.setattr(digest, "verify", overtaken)
    with contextlib.closing(writer), _opened(saved, is_read_only=True) as checkpoints:
        last = 7
        assert checkpoints.restore(ABSTRACT)[0] == 6
        last = 100
        _refused("loses its steps faster than they are read", checkpoints.restore, ABSTRACT)
        named = writer.steps()[-1]
        _refused(f"no checkpoint step {named} in", checkpoints.restore, ABSTRACT, named)


def test_a_relative_directory_and_silence(tmp_path, monkeypatch, capfd, caplog):
    """Also about failures that an event loop of Orbax repeats."""
    monkeypatch.chdir(tmp_path)
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.INFO)
    try:
        with _opened("run") as checkpoints:
            _save(checkpoints, 1)
        _assert_equal(_restored("run", is_read_only=True)[1], _state(1))
    finally:
        logging.set_verbosity(verbosity)
    assert caplog.messages == []
    assert capfd.readouterr() == ("", "")
    for message in ("never retrieved: '1.orbax-checkpoint-tmp/d/1': File too large", "another"):
        getLogger("asyncio").error(message)
    assert caplog.messages == ["another"]
