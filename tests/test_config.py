"""Configurations: fields are checked by type and bound, named when they are wrong, and are JSON."""

import dataclasses
import json
import math
from typing import Annotated, Literal

import jax.numpy as jnp
import pytest
from checks import refused
from small_models import config_of

from ttcd_jax import BatchesConfig, MemoryConfig, axes, errors
from ttcd_jax import config as kinds
from ttcd_jax.errors import UserError
from ttcd_jax.nn.rope import RopeConfig, YarnConfig


class Inner(kinds.Config):
    size: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)  # again
class Other(kinds.Config):
    name: str = dataclasses.field(default_factory=lambda: "x")


class Outer(kinds.Config):
    count: kinds.Positive = 3
    start: kinds.NonNegative = 0
    rate: float = 0.5
    is_on: bool = True
    kind: Literal["a", "b"] = "a"
    layers: tuple[int, ...] = ()
    sizes: tuple[kinds.Positive, ...] = ()
    length: Annotated[int, kinds.AtLeast(2)] | None = None
    limit: kinds.Positive | Literal["all"] = "all"
    scale: kinds.PositiveFloat = 1.0
    penalty: kinds.NonNegativeFloat = 0.0
    share: kinds.Fraction = 0.0
    momentum: kinds.Decay = 0.0
    inner: Inner | Other = Inner()

    def validate(self) -> None:
        if self.count == 13:
            raise UserError(f"count {self.count} is no luck")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("count", 3.0, "int"),
        ("count", True, "int"),
        ("rate", "0.5", "float"),
        ("is_on", 1, "bool"),
        ("kind", "c", "'a' | 'b'"),
        ("layers", (1, "2"), "tuple[int, ...]"),
        ("length", 1.5, "int | None"),
        ("inner", {"size": 1}, "Inner | Other"),
        ("count", 0, "must be at least 1"),
        ("start", -1, "must be at least 0"),
        ("length", 1, "must be at least 2, or None"),
        ("sizes", (1, 0), "must each be at least 1"),
        ("limit", 0, "must be at least 1"),
        ("scale", 0.0, "must be positive and finite"),
        ("scale", math.nan, "must be positive and finite"),
        ("penalty", -0.1, "must be 0 or more, finite"),
        ("share", 1.01, "must be between 0 and 1"),
        ("momentum", 1.0, "must be in [0, 1)"),
    ],
)
def test_a_field_of_the_wrong_type_or_outside_its_bounds_is_named(field, value, expected):
    message = f"Outer.{field} {value} {expected}"
    if not expected.startswith("must"):
        message = f"Outer.{field} must be {expected}, got {value!r} ({type(value).__name__})"
    for build in (Outer, Outer().replace):
        assert refused("", build, **{field: value}) == message


def test_bounds_include_their_ends_integers_are_floats_and_lists_become_tuples():
    outer = Outer(length=2, sizes=[1], limit=1, share=1, penalty=0, rate=1, layers=[1, 2])
    assert (outer.rate, outer.layers, outer.sizes) == (1, (1, 2), (1,))
    assert hash(Outer(layers=[1])) == hash(Outer(layers=(1,)))


def test_only_a_copy_changes_and_it_is_validated_anew():
    for config, name in ((Outer(), "count"), (Other(), "name")):
        for change in (lambda: setattr(config, name, 4), lambda: delattr(config, name)):  # noqa: B023
            with pytest.raises(dataclasses.FrozenInstanceError):
                change()
    assert Outer().replace(count=5).count == 5
    refused("count 13 is no luck", Outer().replace, count=13)


def test_json_gives_back_the_same_configuration():
    rope = RopeConfig(yarn=YarnConfig(factor=4.0, original_length=128))
    memory = MemoryConfig(renorm_chunks=2, eta=0.1 + 0.2)
    for config in (
        Outer(layers=(1, 2), limit=7, inner=Other(name="y")),
        config_of("ipttcd", num_layers=4, fast_layers=(0, 2), rope=rope, memory=memory),
    ):
        assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_and_missing_keys_and_foreign_classes_are_named():
    source = Outer().to_dict()
    words = "Outer has no field 'cuont'; did you mean 'count'"
    refused(words, Outer.from_dict, source | {"cuont": 3})
    for misspelt in (Outer, Outer().replace):
        refused(words, misspelt, cuont=3)
    for kind in ({"type": "Precision"}, {}):  # {}: which of several?
        words = f"class {kind.get('type')!r} is allowed here"
        refused(words, Outer.from_dict, source | {"inner": kind})
    del source["rate"], source["kind"]
    assert Outer.from_dict(source | {"count": 4}) == Outer(count=4)  # from before they existed
    refused("BatchesConfig lacks seq_len", BatchesConfig.from_dict, {})


def test_parameters_name_known_axes_only():
    assert axes.param(jnp.ones((2, 3)), ("embed", "mlp")).get_metadata("axes") == ("embed", "mlp")
    refused("unknown logical axis 'width'", axes.param, jnp.ones(2), ("width",), error=KeyError)
    refused("1 axis names", axes.param, jnp.ones((2, 3)), ("embed",), error=AssertionError)


def test_every_user_error_has_an_exit_status_of_its_own():
    kinds = (x for x in vars(errors).values() if isinstance(x, type))
    classes = [x for x in kinds if issubclass(x, Exception)]
    assert len({cls.exit_code for cls in classes}) == len(classes) == 5
    assert all(issubclass(cls, UserError) and 2 <= cls.exit_code <= 6 for cls in classes)
