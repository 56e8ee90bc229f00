"""A .gin file becomes one checked configuration tree; every mistake in it has its location."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from experiments.gin_loading import load_config, reachable_classes
from experiments.gin_reading import find_gin_file
from ttcd_jax.config import Config, Positive
from ttcd_jax.errors import DataError, UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig(Config):
    theta: float = 10_000.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    window: int | None = None
    rope: RopeConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainConfig(Config):
    mlp_dim: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(Config):
    eta: float
    mode: Literal["fold", "add"] = "add"
    rope: RopeConfig = RopeConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabConfig(Config):
    size: int = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallConfig(Config):
    num_pairs: int = 4
    vocab: VocabConfig

    def validate(self) -> None:
        if self.num_pairs < 1:
            raise DataError(f"RecallConfig.num_pairs is {self.num_pairs}; it must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyConfig(Config):
    length: int = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeConfig(Config):
    steps: Positive = 10
    name: str = "run"
    taps: tuple[int, ...] = (1, 2)
    attention: AttentionConfig
    teacher: AttentionConfig | None = None
    blocks: tuple[PlainConfig | MemoryConfig, ...] = ()
    data: RecallConfig | CopyConfig = CopyConfig()


@pytest.fixture
def load(tmp_path: Path):
    """Writes `text` as run.gin beside the given fragments and loads it."""

    def load_text(text: str, *params: str, **fragments: str) -> TreeConfig:
        (tmp_path / "run.gin").write_text(text)
        for name, fragment in fragments.items():
            (tmp_path / f"{name}.gin").write_text(fragment)
        return load_config(TreeConfig, "run.gin", params, config_dir=tmp_path)

    return load_text


@pytest.fixture
def refusal(load):
    """The one line that a text is refused with."""

    def message(text: str, *params: str, **fragments: str) -> str:
        with pytest.raises(UserError) as caught:
            load(text, *params, **fragments)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return message


def test_values_references_and_containers_are_bound(load):
    config = load(
        "TreeConfig.steps = 500\n"
        "TreeConfig.taps = [3, 4]\n"
        "TreeConfig.data = @RecallConfig()\n"
        "TreeConfig.blocks = (@PlainConfig(), @MemoryConfig())\n"
        "MemoryConfig:\n"
        "  eta = 0.3\n"
        "  mode = 'fold'\n"
    )
    assert config == TreeConfig(
        steps=500,
        taps=(3, 4),
        attention=AttentionConfig(rope=RopeConfig()),
        data=RecallConfig(vocab=VocabConfig()),
        blocks=(PlainConfig(), MemoryConfig(eta=0.3, mode="fold")),
    )


def test_required_fields_of_one_class_are_built_unbound(load):
    config = load("RopeConfig.theta = 5.0")
    assert config.attention == AttentionConfig(rope=RopeConfig(theta=5.0))


def test_inner_scopes_override_outer_ones(load):
    config = load(
        "AttentionConfig.window = 64\n"
        "teacher/AttentionConfig.window = 128\n"
        "teacher/RopeConfig.theta = 7.0\n"
        "TreeConfig.teacher = @teacher/AttentionConfig()\n"
    )
    assert config.attention == AttentionConfig(window=64, rope=RopeConfig())
    assert config.teacher == AttentionConfig(window=128, rope=RopeConfig(theta=7.0))


def test_macros_stand_for_values_and_references(load):
    config = load(
        "STEPS = 5\nLENGTH = %STEPS\nDATA = @CopyConfig()\n"
        "CopyConfig.length = %LENGTH\nTreeConfig.data = %DATA\nTreeConfig.taps = [%STEPS, 1]"
    )
    assert config.data == CopyConfig(length=5)
    assert config.taps == (5, 1)


def test_a_file_overrides_its_includes_and_a_parameter_overrides_both(load):
    text = "include 'base.gin'\nTreeConfig.steps = 2"
    base = "TreeConfig.steps = 1\nTreeConfig.name = 'base'\nLENGTH = 3\nRopeConfig.theta = %LENGTH"
    assert load(text, base=base).steps == 2
    config = load(text, "TreeConfig.steps=3", "TreeConfig.steps=4", "LENGTH=9", base=base)
    assert (config.steps, config.name, config.attention.rope.theta) == (4, "base", 9)


def test_a_fragment_may_be_included_twice_and_conflicts_settled(load):
    fragments = {
        "base": "TreeConfig.name = 'base'",
        "first": "include 'base.gin'\nTreeConfig.steps = 1",
        "second": "include 'base.gin'\nTreeConfig.steps = 2",
    }
    text = "include 'first.gin'\ninclude 'second.gin'\n"
    assert load(text + "TreeConfig.steps = 3", **fragments).steps == 3


def test_a_parameter_may_swap_a_class_the_file_configured(load):
    text = (
        "PAIRS = 3\nDATA = @RecallConfig()\nTreeConfig.data = %DATA\n"
        "RecallConfig.num_pairs = %PAIRS\nVocabConfig.size = 7\n"
    )
    for swap in ("TreeConfig.data=@CopyConfig()", "DATA=@CopyConfig()"):
        assert load(text, swap, "CopyConfig.length=5").data == CopyConfig(length=5)


def test_loading_twice_with_other_classes_leaves_nothing_behind(load, tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class TreeConfig(Config):
        width: int = 1

    load("TreeConfig.steps = 3")
    (tmp_path / "other.gin").write_text("TreeConfig.width = 2")
    assert load_config(TreeConfig, "other.gin", config_dir=tmp_path).width == 2
    assert load("").steps == 10


def test_scopes_and_macros_mean_what_gin_means(load):
    import gin

    text = (
        "WINDOW = 32\nAttentionConfig.window = %WINDOW\nRopeConfig.theta = 1.0\n"
        "AttentionConfig.rope = @RopeConfig()\nTreeConfig.attention = @AttentionConfig()\n"
        "TreeConfig.teacher = @outer/inner/AttentionConfig()\n"
        "outer/AttentionConfig.window = 64\nouter/RopeConfig.theta = 2.0\n"
        "outer/inner/RopeConfig.theta = 3.0\n"
    )
    gin.clear_config()
    with gin.config.interactive_mode():
        builders = [
            gin.external_configurable(cls, name=cls.__name__, module="parity")
            for cls in (TreeConfig, AttentionConfig, RopeConfig)
        ]
    gin.parse_config(text)
    expected = builders[0]().to_dict()
    gin.clear_config()
    assert load(text).to_dict() == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "TreConfig.steps = 1",
            "run.gin:1: no configuration class 'TreConfig'; did you mean 'Tree",
        ),
        ("\nTreeConfig.stepz = 1", "run.gin:2: TreeConfig has no field 'stepz'; did you mean 'ste"),
        ("TreeConfig:\n  stepz = 1", "run.gin:2: TreeConfig has no field 'stepz'"),
        ("Zebra.x = 1", "'Zebra'; known are AttentionConfig, CopyConfig"),
        (
            "TreeConfig.data = @CopyConfg()",
            "run.gin:1: no configuration class 'CopyConfg'; did you",
        ),
        ("TreeConfig.data = @CopyConfig", "run.gin:1: write @CopyConfig(), with parentheses"),
        (
            "STEPS = 1\nTreeConfig.steps = %STEP",
            "run.gin:2: no macro %STEP is defined; did you mean",
        ),
        ("STEPS = 1", "run.gin:1: macro STEPS is never used"),
        ("TreeConfig = 1", "run.gin:1: macro TreeConfig is never used; did you mean 'TreeConfig'"),
        ("A = %B\nB = %A\nTreeConfig.steps = %A", "contains itself: TreeConfig -> %A -> %B -> %A"),
        (
            "TreeConfig.steps = 1\nTreeConfig.steps = 1",
            "run.gin:2: TreeConfig.steps is already bound",
        ),
        ("TreeConfig.steps = 'x'", "run.gin:1: TreeConfig.steps must be int, got 'x' (str)"),
        ("\nTreeConfig.steps = 0", "run.gin:2: TreeConfig.steps 0 must be at least 1"),
        ("TreeConfig.blocks = (@CopyConfig(),)", "run.gin:1: TreeConfig.blocks must be tuple["),
        (
            "TreeConfig.data = @MemoryConfig()",
            "MemoryConfig lacks a value; bind MemoryConfig.eta = <",
        ),
        (
            "RecallConfig.num_pairs = 2",
            "run.gin:1: RecallConfig.num_pairs has no effect, no RecallConfig is built; "
            "remove it or bind TreeConfig.data = @RecallConfig()",
        ),
        (
            "big/RopeConfig.theta = 2.0",
            "no RopeConfig is built in scope 'big'; remove it or bind "
            "AttentionConfig.rope = @big/RopeConfig() or MemoryConfig.rope = @big/RopeConfig()",
        ),
    ],
)
def test_names_and_values_are_checked(refusal, text, expected):
    assert expected in refusal(text)


def test_a_missing_choice_names_the_classes(tmp_path):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class ChoiceConfig(Config):
        data: RecallConfig | CopyConfig
        steps: Positive

    (tmp_path / "run.gin").touch()
    with pytest.raises(UserError, match="ChoiceConfig lacks a value") as caught:
        load_config(ChoiceConfig, "run.gin", config_dir=tmp_path)
    assert "ChoiceConfig.data = @RecallConfig() or @CopyConfig()" in str(caught.value)
    assert "ChoiceConfig.steps = <int>" in str(caught.value)


def test_an_error_of_validate_keeps_its_class_and_gains_its_place(load):
    with pytest.raises(DataError, match=r"^run\.gin:2: RecallConfig\.num_pairs is 0; it must"):
        load("TreeConfig.data = @RecallConfig()\nRecallConfig.num_pairs = 0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("TreeConfig.steps = 1 + 1", "run.gin:1: Expected newline."),
        ("\nTreeConfig.steps 3", "run.gin:2: Couldn't parse statement, expected ':' or '='."),
        (
            "TreeConfig.name = small",
            "run.gin:1: cannot read the value 'small'; a string needs quotes",
        ),
        ("TreeConfig.taps = [1,\n", "run.gin:1: unexpected EOF in multi-line statement"),
        ("TreeConfig.name = 'open\n", "run.gin:1: unterminated string literal"),
        ("TreeConfig.name = __import__('os')", "cannot read the value '__import__'"),
        ("import os", "run.gin:1: a configuration may not import 'os', only bind values"),
        ("\nfrom __gin__ import dynamic_registration", "run.gin:2: a configuration may not import"),
        ("include '/etc/hostname'", "run.gin:1: include '/etc/hostname' leaves"),
        ("include '../outside.gin'", "run.gin:1: include '../outside.gin' leaves"),
        ("include 'link.gin'", "run.gin:1: include 'link.gin' leaves"),
        ("include 'ran.gin'", "run.gin:1: no file 'ran.gin' to include; did you mean run.gin"),
        ("include '\\0'", "run.gin:1: no file '\\x00' to include"),
        ("include 'run.gin'", "run.gin includes itself through run.gin"),
        ("TreeConfig.steps = 1\ninclude 'x.gin'", "run.gin:2: includes come before the bindings"),
        ("TreeConfig.name = '\udcff'", "cannot read"),
    ],
)
def test_syntax_imports_and_includes_are_checked(tmp_path, text, expected):
    outside = tmp_path / "outside.gin"
    outside.write_text("TreeConfig.steps = 1")
    config_dir = tmp_path / "configs"
    config_dir.mkdir()
    (config_dir / "link.gin").symlink_to(outside)
    (config_dir / "run.gin").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError) as caught:
        load_config(TreeConfig, "run.gin", config_dir=config_dir)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_fragments_that_bind_one_key_are_refused(refusal):
    message = refusal(
        "include 'a.gin'\ninclude 'b.gin'", a="TreeConfig.steps = 1", b="TreeConfig.steps = 2"
    )
    assert message.startswith("b.gin:1: TreeConfig.steps is already bound at a.gin:1; keep one, or")


def test_a_mistake_inside_a_fragment_names_the_fragment(refusal):
    assert refusal("include 'a.gin'", a="\nTreeConfig.stepz = 1").startswith("a.gin:2: TreeConfig")


@pytest.mark.parametrize(
    ("param", "expected"),
    [
        ("TreeConfig.stepz=1", "--param TreeConfig.stepz=1: TreeConfig has no field 'stepz'; did"),
        ("TreeConfig.steps='x'", "--param TreeConfig.steps='x': TreeConfig.steps must be int"),
        ("TreeConfig.name=small", "cannot read the value 'small'; a string needs quotes"),
        ("RecallConfig.num_pairs=2", "RecallConfig.num_pairs has no effect"),
        ("TreeConfig.steps", "--param TreeConfig.steps: Couldn't parse statement"),
        ("import os", "--param import os: a configuration may not import 'os', only bind"),
        ("include 'absent.gin'", "--param include 'absent.gin': no file 'absent.gin' to include"),
    ],
)
def test_parameters_are_checked(refusal, param, expected):
    assert expected in refusal("", param)


def test_a_file_is_found_by_name_or_path(tmp_path, monkeypatch):
    config_dir = tmp_path / "configs"
    (config_dir / "mad").mkdir(parents=True)
    (config_dir / "quickstart.gin").touch()
    (config_dir / "mad" / "recall.gin").touch()
    (tmp_path / "mine.gin").touch()
    monkeypatch.chdir(tmp_path)
    assert find_gin_file("quickstart.gin", config_dir) == config_dir / "quickstart.gin"
    assert find_gin_file("mine.gin", config_dir) == Path("mine.gin")
    assert find_gin_file(str(tmp_path / "mine.gin"), config_dir) == tmp_path / "mine.gin"
    with pytest.raises(UserError, match=r"'quickstrt\.gin'.*did you mean quickstart\.gin\?"):
        find_gin_file("quickstrt.gin", config_dir)
    with pytest.raises(UserError, match=r"'recall\.gin'.*did you mean mad/recall"):
        find_gin_file("recall.gin", config_dir)


def test_classes_are_reached_through_unions_tuples_and_optionals():
    assert set(reachable_classes(TreeConfig)) == {
        "TreeConfig", "AttentionConfig", "RopeConfig", "PlainConfig", "MemoryConfig",
        "RecallConfig", "CopyConfig", "VocabConfig",
    }  # fmt: skip


def test_an_inherited_configuration_takes_single_overrides(tmp_path):
    base = AttentionConfig(window=9, rope=RopeConfig(theta=5.0))

    def attention(text):
        (tmp_path / "run.gin").write_text(text)
        inherit = {"attention": base}.get
        return load_config(
            TreeConfig, "run.gin", config_dir=tmp_path, inherit=lambda field, _: inherit(field)
        ).attention

    assert attention("TreeConfig.steps = 1") == base
    assert attention("AttentionConfig.window = 3") == base.replace(window=3)
    assert attention("RopeConfig.theta = 7.0") == base.replace(rope=RopeConfig(theta=7.0))
    assert attention("AttentionConfig.rope = @RopeConfig()") == base.replace(rope=RopeConfig())
    own = "TreeConfig.attention = @AttentionConfig()"
    assert attention(own) == AttentionConfig(rope=RopeConfig())
    with pytest.raises(UserError, match="has no effect"):
        attention("PlainConfig.mlp_dim = 3")
