"""A .gin file becomes one checked configuration tree; every mistake in it has its location."""

import dataclasses
import functools
from pathlib import Path
from typing import Literal

import pytest
from checks import refused

from ttcd_jax.config import Config, Positive
from ttcd_jax.errors import DataError
from ttcd_jax.run.bindings import find_gin_file, load_config, read_file, read_params


class Rope(Config):
    theta: float = 10_000.0


class Attention(Config):
    window: int | None = None
    rope: Rope


class Plain(Config):
    mlp_dim: int = 8


class Memory(Config):
    eta: float
    mode: Literal["fold", "add"] = "add"
    rope: Rope = Rope()


class Recall(Config):
    num_pairs: int = 4
    plain: Plain

    def validate(self) -> None:
        if self.num_pairs < 1:
            raise DataError(f"Recall.num_pairs is {self.num_pairs}; it must be positive")


class Copy(Config):
    length: int = 16


class Tree(Config):
    kind = "tree"  # no field
    steps: Positive = 10
    name: str = "run"
    taps: tuple[int, ...] = (1, 2)
    attention: Attention
    teacher: Attention | None = None
    blocks: tuple[Plain | Memory, ...] = ()
    data: Recall | Copy = Copy()


@pytest.fixture
def load(tmp_path: Path):
    """Loads `text`, written as run.gin beside the given fragments."""
    folder = tmp_path / "configs"
    folder.mkdir()

    def load_text(text, *params, root=Tree, inherit=lambda *_: None, **fragments):
        for name, content in ({"run": text} | fragments).items():
            (folder / f"{name}.gin").write_bytes(content.encode(errors="surrogateescape"))
        return load_config(root, "run.gin", params, config_dir=folder, inherit=inherit)

    return load_text


@pytest.fixture
def refusal(load):
    """The one line that a text is refused with."""

    return functools.partial(refused, "", load)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Tree.steps = 500\nTree.taps = [3, 4]\nTree.data = @Recall()\n"
            "Tree.blocks = (@Plain(), @Memory())\nMemory:\n  eta = 0.3\n  mode = 'fold'\n",
            {"steps": 500, "taps": (3, 4), "data": Recall(plain=Plain())}
            | {"blocks": (Plain(), Memory(eta=0.3, mode="fold"))},
        ),
        ("Rope.theta = 5.0", {"attention": Attention(rope=Rope(theta=5.0))}),
        (
            "Attention.window = 64\nteacher/Attention.window = 128\nteacher/Rope.theta = 7.0\n"
            "Tree.teacher = @teacher/Attention()\n",
            {"attention": Attention(window=64, rope=Rope())}
            | {"teacher": Attention(window=128, rope=Rope(theta=7.0))},
        ),
        (
            "STEPS = 5\nLENGTH = %STEPS\nDATA = @Copy()\n"
            "Copy.length = %LENGTH\nTree.data = %DATA\nTree.taps = [%STEPS, 1]",
            {"data": Copy(length=5), "taps": (5, 1)},
        ),
        (
            "THETA = 3.0\nouter/Rope.theta = 2.0\nouter/inner/Rope.theta = %THETA\n"
            "Tree.teacher = @outer/inner/Attention()",
            {"teacher": Attention(rope=Rope(theta=3.0))},
        ),
    ],
)
def test_values_references_scopes_and_macros_are_bound(load, text, expected):
    assert load(text) == Tree(**{"attention": Attention(rope=Rope())} | expected)


def test_a_file_overrides_its_includes_and_a_parameter_overrides_both(load):
    text = "include 'base.gin'\nTree.steps = 2"
    base = "Tree.steps = 1\nTree.name = 'base'\nLENGTH = 3\nRope.theta = %LENGTH"
    assert load(text, base=base).steps == 2
    config = load(text, "Tree.steps=3", "Tree.steps=4", "LENGTH=9", base=base)
    assert (config.steps, config.name, config.attention.rope.theta) == (4, "base", 9)
    # A fragment may be included twice, and conflicts settled.
    twice = {x: f"include 'base.gin'\nTree.name = '{x}'" for x in ("first", "second")}
    text = "include 'first.gin'\ninclude 'second.gin'\nTree.name = 'mine'"
    assert load(text, base=base, **twice).name == "mine"


def test_a_parameter_may_swap_a_class_the_file_configured(load):
    text = (
        "PAIRS = 3\nDATA = @Recall()\nTree.data = %DATA\n"
        "Recall.num_pairs = %PAIRS\nPlain.mlp_dim = 7\n"
    )
    for swap in ("Tree.data=@Copy()", "DATA=@Copy()"):
        assert load(text, swap, "Copy.length=5").data == Copy(length=5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Tre.steps = 1", "run.gin:1: no configuration class 'Tre'; did you mean 'Tree"),
        ("\nTree.stepz = 1", "run.gin:2: Tree has no field 'stepz'; did you mean 'ste"),
        ("Zebra.x = 1", "'Zebra'; known are Attention, Copy, Memory, Plain, Recall, Rope, Tree"),
        ("Tree.data = @Coppy()", "class 'Coppy'; did you mean 'Copy'? (one of your own: --import="),
        ("Tree.kind = 'x'", "run.gin:1: Tree has no field 'kind': annotate it there"),
        ("Tree.data = @Copy", "run.gin:1: write @Copy(), with parentheses"),
        ("STEPS = 1\nTree.steps = %STEP", "run.gin:2: no macro %STEP is defined; did you mean"),
        ("STEPS = %STEPS", "run.gin:1: macro STEPS is never used: where a field that read it is"),
        ("a/Tree.steps = 1", "no effect, no Tree is built in scope 'a'; remove it"),
        ("Tree = 1", "run.gin:1: macro Tree is never used; did you mean 'Tree'"),
        ("A = %B\nB = %A\nTree.steps = %A", "contains itself: A -> B -> A"),
        ("Tree.steps = 1\nTree.steps = 1", "run.gin:2: Tree.steps is already bound"),
        ("\nTree.steps = 0", "run.gin:2: Tree.steps 0 must be at least 1"),
        ("Tree.data = @Memory()", "Memory lacks a value; bind Memory.eta = <"),
        ("Recall.num_pairs = 2", "run.gin:1: Recall.num_pairs has no effect, no Recall is built; "),
        ("Recall.num_pairs = 2", "no Recall is built; remove it or bind Tree.data = @Recall()"),
        ("Memory.mode = 'fold'", "remove it or bind Tree.blocks = (@Memory(),)"),
        ("big/Rope.theta = 2.0", "bind Attention.rope = @big/Rope() or Memory.rope = @big/Rope()"),
        ("Tree.steps = 1 + 1", "run.gin:1: Expected newline."),
        ("Tree.name = small", "run.gin:1: cannot read the value 'small'; a string needs quotes"),
        ("Tree.taps = [1,\n", "run.gin:1: unexpected EOF in multi-line statement"),
        ("Tree.data = Recall(n=1)", "run.gin:1: write @Recall() for Recall(...), and each field"),
        ("Tree.name = __import__('os')", "cannot read the value '__import__'"),
        ("import os", "run.gin:1: a configuration may not import 'os', only bind values"),
        ("include '/etc/hostname'", "run.gin:1: include '/etc/hostname' leaves"),
        ("include 'link.gin'", "run.gin:1: include 'link.gin' leaves"),
        ("include '\\0'", "run.gin:1: no file '\\x00' to include"),
        ("include 'run.gin'", "run.gin includes itself through run.gin"),
        ("Tree.steps = 1\ninclude 'x.gin'", "run.gin:2: includes come before the bindings"),
        ("Tree.name = '\udcff'", "cannot read"),
    ],
)
def test_a_mistake_is_one_line_with_its_place(refusal, tmp_path, text, expected):
    outside = tmp_path / "outside.gin"
    outside.write_text("Tree.steps = 1")
    (tmp_path / "configs/link.gin").symlink_to(outside)
    assert expected in refusal(text)


def test_includes_are_found_beside_their_file_then_among_the_recipes(tmp_path, monkeypatch):
    own, recipes = tmp_path / "own", tmp_path / "configs"
    for name, text in {
        "own/run.gin": "include 'sub/more.gin'\ninclude 'shared.gin'",
        "own/sub/more.gin": "include 'beside.gin'\nTree.steps = 5",
        "own/sub/beside.gin": "Tree.name = 'beside'",
        "configs/shared.gin": "Tree.taps = (7,)",
        "own/leaves.gin": "include '../configs/shared.gin'",
        "own/large.gin": "Tree.steps = 1\n" * 100_000,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    read = read_file(own / "run.gin", recipes)
    monkeypatch.chdir(own)
    params = read_params(["include 'sub/more.gin'", "include 'shared.gin'"], recipes)
    for found in (read, params):
        values = {(x.field, x.value) for x in found.values()}
        assert values == {("steps", 5), ("name", "beside"), ("taps", (7,))}
    for name, words in (
        ("leaves", "leaves.gin:1: include '../configs/shared.gin' leaves |own"),
        ("large", "has 1500000 bytes, a configuration at most 1048576"),
    ):
        refused(words, read_file, own / f"{name}.gin", recipes)


def test_a_missing_choice_names_the_classes_of_which_no_two_may_have_one_name(refusal):
    def made(name="Root", **fields):
        options = {"bases": (Config,), "frozen": True, "kw_only": True}
        return dataclasses.make_dataclass(name, fields.items(), **options)

    bindings = "Root.data = @Recall() or @Copy(), Root.steps = <int>"
    message = refusal("", root=made(data=Recall | Copy, steps=Positive))
    assert message == f"Root lacks a value; bind {bindings}"
    message = refusal("", root=made(own=made("Rope"), attention=Attention))
    assert message == "two configuration classes are called Rope: rename yours"


def test_a_mistake_in_a_fragment_names_it_and_one_of_validate_keeps_its_class(refusal):
    assert refusal("include 'a.gin'", a="\nTree.stepz = 1").startswith("a.gin:2: Tree")
    message = refusal("include 'a.gin'\ninclude 'b.gin'", a="Tree.steps = 1", b="Tree.steps = 2")
    assert message.startswith("b.gin:1: Tree.steps is already bound at a.gin:1; keep one, or")
    message = refusal("Tree.data = @Recall()\nRecall.num_pairs = 0", error=DataError)
    assert message.startswith("run.gin:2: Recall.num_pairs is 0; it must")


def test_parameters_are_checked(refusal):
    for param, expected in {
        "Tree.stepz=1": "--param Tree.stepz=1: Tree has no field 'stepz'; did",
        "Tree.steps": "--param Tree.steps: Couldn't parse statement",
        "Tree.name='\udcff'": "it is not UTF-8",
        "include 'absent.gin'": "--param include 'absent.gin': no file 'absent.gin' to include",
    }.items():
        assert expected in refusal("", param)


def test_a_file_is_found_by_name_or_path(tmp_path, monkeypatch):
    config_dir = tmp_path / "configs"
    (config_dir / "mad").mkdir(parents=True)
    for name in ("configs/quickstart.gin", "configs/mad/recall.gin", "mine.gin"):
        (tmp_path / name).write_text("# ... --gin=NAME\n")  # what is launched is suggested
    monkeypatch.chdir(tmp_path)
    assert find_gin_file("quickstart.gin", config_dir) == config_dir / "quickstart.gin"
    for mine in (Path("mine.gin"), tmp_path / "mine.gin"):
        assert find_gin_file(str(mine), config_dir) == mine
    for name, nearest in (("quickstrt.gin", "quickstart.gin"), ("recall.gin", "mad/recall.gin")):
        refused(f"'{name}' in |; did you mean {nearest}", find_gin_file, name, config_dir)


def test_an_inherited_configuration_takes_single_overrides(load):
    base = Attention(window=9, rope=Rope(theta=5.0))

    def attention(text):
        return load(text, inherit=lambda field, _: {"attention": base}.get(field)).attention

    assert attention("Tree.steps = 1") == base
    assert attention("Attention.window = 3") == base.replace(window=3)
    assert attention("Rope.theta = 7.0") == base.replace(rope=Rope(theta=7.0))
    assert attention("Attention.rope = @Rope()") == base.replace(rope=Rope())
    assert attention("Tree.attention = @Attention()") == Attention(rope=Rope())
    refused("has no effect", attention, "Plain.mlp_dim = 3")
