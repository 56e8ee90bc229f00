import dataclasses
import json
import math
import re
from typing import Annotated, Literal

import pytest
from small_models import config_of

from ttcd_jax import axes, errors
from ttcd_jax.config import (
    AtLeast,
    Config,
    Decay,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    closest,
)
from ttcd_jax.data.sources import BatchesConfig
from ttcd_jax.errors import UserError
from ttcd_jax.methods.delta_net import DeltaRuleConfig
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.rope import RopeConfig, YarnConfig
from ttcd_jax.precision import Precision


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inner(Config):
    size: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other(Config):
    name: str = "x"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outer(Config):
    count: int = 3
    rate: float = 0.5
    is_on: bool = True
    kind: Literal["a", "b"] = "a"
    layers: tuple[int, ...] = ()
    limit: int | None = None
    inner: Inner | Other = Inner()

    def validate(self) -> None:
        if self.count < 0:
            raise UserError(f"count {self.count} is negative")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("count", 3.0, "int"),
        ("count", True, "int"),
        ("count", "3", "int"),
        ("rate", "0.5", "float"),
        ("rate", False, "float"),
        ("is_on", 1, "bool"),
        ("kind", "c", "'a' | 'b'"),
        ("layers", (1, "2"), "tuple[int, ...]"),
        ("layers", 1, "tuple[int, ...]"),
        ("limit", 1.5, "int | NoneType"),
        ("inner", {"size": 1}, "Inner | Other"),
        ("inner", None, "Inner | Other"),
    ],
)
def test_a_field_of_the_wrong_type_is_named_with_its_value(field, value, expected):
    message = f"Outer.{field} must be {expected}, got {value!r} ({type(value).__name__})"
    with pytest.raises(UserError, match=re.escape(message)):
        Outer(**{field: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounded(Config):
    count: Positive = 1
    start: NonNegative = 0
    length: Annotated[int, AtLeast(2)] | None = None
    sizes: tuple[Positive, ...] = ()
    limit: Positive | Literal["all"] = "all"
    rate: PositiveFloat = 1.0
    penalty: NonNegativeFloat = 0.0
    share: Fraction = 0.0
    momentum: Decay = 0.0


@pytest.mark.parametrize(
    ("field", "value", "refusal"),
    [
        ("count", 0, "must be at least 1"),
        ("start", -1, "must be at least 0"),
        ("length", 1, "must be at least 2, or None"),
        ("sizes", (1, 0), "must each be at least 1"),
        ("limit", 0, "must be at least 1"),
        ("rate", 0.0, "must be positive and finite"),
        ("rate", math.inf, "must be positive and finite"),
        ("rate", math.nan, "must be positive and finite"),
        ("penalty", -0.1, "must be 0 or more, finite"),
        ("share", 1.01, "must be between 0 and 1"),
        ("momentum", 1.0, "must be in [0, 1)"),
    ],
)
def test_a_value_outside_its_bounds_is_named_with_what_is_allowed(field, value, refusal):
    with pytest.raises(UserError) as caught:
        Bounded(**{field: value})
    assert str(caught.value) == f"Bounded.{field} {value} {refusal}"


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (MemoryConfig, {"eta": -1.0}),
        (MemoryConfig, {"zero_slope": -1.0}),
        (TransformerConfig, {"init_std": -0.02}),
        (TransformerConfig, {"norm_eps": -1e-6}),
        (TransformerConfig, {"qk_norm_eps": -1e-6}),
        (DeltaRuleConfig, {"value_expansion": -1.0}),
        (YarnConfig, {"factor": 2.0, "original_length": 8, "slow_turns": 0.0}),
        (YarnConfig, {"factor": 2.0, "original_length": 8, "slow_turns": 64.0}),
    ],
)
def test_rates_scales_and_turns_below_zero_are_refused(cls, values):
    whole = {**config_of("ipttcd").to_dict(), **values} if cls is TransformerConfig else values
    with pytest.raises(UserError, match="must be"):
        cls.from_dict(whole)


def test_bounds_include_their_ends_and_leave_types_as_they_are():
    Bounded(length=2, sizes=[1], limit=1, share=1, penalty=0)
    with pytest.raises(UserError, match=r"Bounded\.length must be int \| NoneType, got 2\.0"):
        Bounded(length=2.0)


def test_integers_are_floats_and_lists_become_tuples():
    outer = Outer(rate=1, layers=[1, 2], limit=None)
    assert outer.rate == 1
    assert outer.layers == (1, 2)
    assert hash(outer) == hash(Outer(rate=1, layers=(1, 2)))


def test_only_a_copy_changes_and_it_is_validated_anew():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Outer().count = 4
    assert Outer().replace(count=5).count == 5
    with pytest.raises(UserError, match="count -1 is negative"):
        Outer().replace(count=-1)
    with pytest.raises(UserError, match=r"Outer\.count must be int"):
        Outer().replace(count="5")


YARN = RopeConfig(yarn=YarnConfig(factor=4.0, original_length=128))
NARROW = Precision(compute="bfloat16")


@pytest.mark.parametrize(
    "config",
    [
        Outer(layers=(1, 2), limit=7, inner=Other(name="y")),
        MemoryConfig(renorm_chunks=2, eta=0.1 + 0.2),
        YARN,
        config_of("ipttcd", num_layers=4, fast_layers=(0, 2), rope=YARN, precision=NARROW),
    ],
    ids=lambda config: type(config).__name__,
)
def test_json_gives_back_the_same_configuration(config):
    text = json.dumps(config.to_dict())
    assert type(config).from_dict(json.loads(text)) == config


def test_unknown_and_missing_keys_are_named():
    source = Outer().to_dict()
    with pytest.raises(UserError, match="Outer has no field 'cuont'; did you mean 'count'"):
        Outer.from_dict(source | {"cuont": 3})
    for misspelt in (Outer, Outer().replace):
        with pytest.raises(UserError, match="Outer has no field 'cuont'; did you mean 'count'"):
            misspelt(cuont=3)
    del source["rate"], source["kind"]
    assert Outer.from_dict(source | {"count": 4}) == Outer(count=4)  # from before they existed
    with pytest.raises(UserError, match="BatchesConfig lacks seq_len"):
        BatchesConfig.from_dict({})


def test_a_nested_configuration_of_a_foreign_class_is_refused():
    source = Outer().to_dict() | {"inner": {"type": "Precision"}}
    with pytest.raises(UserError, match="'Precision' is allowed here"):
        Outer.from_dict(source)


def test_the_nearest_name_is_offered_or_none():
    assert closest("windw", ["window", "dim"]) == "; did you mean 'window'?"
    assert closest("zzz", ["window", "dim"]) == ""


def test_parameters_name_known_axes_only():
    import jax.numpy as jnp

    assert axes.param(jnp.ones((2, 3)), ("embed", "mlp")).get_metadata("axes") == ("embed", "mlp")
    with pytest.raises(KeyError, match="unknown logical axis 'width'"):
        axes.param(jnp.ones(2), ("width",))
    with pytest.raises(AssertionError, match="1 axis names"):
        axes.param(jnp.ones((2, 3)), ("embed",))


def test_every_user_error_has_an_exit_status_of_its_own():
    kinds = (x for x in vars(errors).values() if isinstance(x, type))
    classes = [x for x in kinds if issubclass(x, Exception)]
    assert len({cls.exit_code for cls in classes}) == len(classes) == 5
    assert all(issubclass(cls, UserError) and 2 <= cls.exit_code <= 6 for cls in classes)
