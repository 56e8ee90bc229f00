"""The registry of methods: the block of each layer of a transformer. No other module knows a method
by name. Importing a method's module registers it; `ttcd_jax.methods` imports all of its modules,
and a module outside the package can register more."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, NamedTuple

from ttcd_jax.config import Config, Positive
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.nn.attention import AttentionConfig, Heads
from ttcd_jax.nn.block import BlockConfig
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.registry import Registry

REQUIRED = object()  # the default of a key that has none


class Settings(Config):
    """Base of the settings of methods, the type of `TransformerConfig.memory`."""

    words: ClassVar[Any] = ""  # what they add to the method's label
    goes_on_as_student: ClassVar[bool] = False  # whether the model's own stream is the student's

    def switched_off(self, length: int) -> "Settings | None":
        """Settings with the same parameters under which nothing is read from the memory in rows of
        `length` tokens; None where the memory is the mixer itself."""
        return None

    def frozen(self, config: Any) -> Any:
        """The model, a `TransformerConfig`, that reads the memory of a state and writes nothing."""
        raise UserError(
            f"a model of method {config.method!r} has no memory in a down projection that could be "
            "frozen: keep the memory"
        )


class ModelConfig(Heads):
    """The sizes that all layers of a model share, and the settings of its method. `window` is the
    attention window of every layer with attention (the teacher's in layers with a student), None
    full attention; `student_window` the student's, in tokens. `mlp_dim`: the features of an MLP.
    `memory`: the settings of the method, None its defaults."""

    mlp_dim: Positive
    student_window: Positive = 1024
    memory: Settings | None = None

    def attention(self) -> AttentionConfig:
        heads = {"num_kv_heads": self.kv_heads, "head_dim": self.head_size}
        return self.part(AttentionConfig, **heads)

    def mlp(self) -> MLPConfig:
        return self.part(MLPConfig, hidden_dim=self.mlp_dim)

    def plain_block(self) -> BlockConfig:
        return BlockConfig(mixer=self.attention(), mlp=self.mlp())

    def part[C: Config](self, cls: type[C], **own: Any) -> C:
        """A `cls` of the fields `own`, and of those that this configuration has as well."""
        names = {field.name for field in dataclasses.fields(cls)} - own.keys()
        names &= {field.name for field in dataclasses.fields(self)}
        return cls(**own, **{name: getattr(self, name) for name in names})


class Key(NamedTuple):
    """One key of the reference's `config.json`: the field of `TransformerConfig` it sets, its
    default when absent, and, for a string, our name for it."""

    name: str
    field: str
    default: Any = REQUIRED
    choices: Mapping[str, str] | None = None


class Source:
    """A `config.json` of the reference, read with checks. Errors are `DataError`s by key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def number(self, name: str, default: Any) -> Any:
        """The number (or bool) under `name`, below 2^53 in magnitude."""
        value = self.values.get(name, default)
        if not isinstance(value, int | float) or not abs(value) < 2**53:
            raise DataError(f"{name}={str(value)[:40]!r} is not a number of usable size")
        return value

    def positive(self, name: str, default: Any = 0) -> Any:
        value = self.number(name, default)
        if isinstance(value, bool) or value <= 0:
            raise DataError(f"{name}={value!r} is not a number above 0")
        return value

    def whole(self, name: str) -> int:
        """The positive number under `name`, which has no fraction."""
        value = self.positive(name)
        if value != int(value):
            raise DataError(f"{name}={value!r} is not a whole number")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise DataError(f"{name}={str(value)[:40]!r} is neither true nor false")
        return value


class Reference(NamedTuple):
    """A method as a model class of the reference implementation."""

    model_types: tuple[str, ...]  # exports write the first
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any] = {}  # keys of which only this value is supported
    # Fields that follow from several keys, and the inverse.
    read: Callable[[Source], dict[str, Any]] = lambda source: {}
    write: Callable[[Any, Any], dict[str, Any]] = lambda config, settings: {}
    has_switch: bool = False  # "ttt_mode": false makes it a plain transformer


# Keys that several model classes share.
COMMON_KEYS = (
    Key("vocab_size", "vocab_size"),
    Key("hidden_size", "dim"),
    Key("num_hidden_layers", "num_layers"),
    Key("norm_eps", "norm_eps", 1e-6),
    Key("tie_word_embeddings", "has_tied_head", False),
    Key("initializer_range", "init_std", 0.02),
)
ATTENTION_KEYS = (
    *COMMON_KEYS,
    Key("num_heads", "num_heads"),
    Key("num_kv_heads", "num_kv_heads", None),
    Key("head_dim", "head_dim", None),
    Key("window_size", "window", None),
    Key("rope_theta", "rope.base", 10000.0),
    Key("qk_norm", "has_qk_norm", False),
    Key("qkv_bias", "has_qkv_bias", False),
)
FAST_KEYS = (*ATTENTION_KEYS, Key("ttt_layers", "fast_layers"))
ATTENTION_FIXED = {"use_output_gate": False, "attn": None}
PROJ_INIT = {"diagonal": "identity", "diagonal_gaussian": "gaussian_diagonal"}
PROJ_INIT |= {"zero": "zeros", "random": "normal"}


@dataclasses.dataclass(frozen=True)
class Method:
    """A method by its name in configurations and its label in tables.

    `block(config, settings)` is the block of a layer with the method's memory, or those of all
    layers; it raises `UserError` for a model that the method cannot be. `layers`: "fast" for those
    in `TransformerConfig.fast_layers`, "all", or "none" for a method without memory. `twin`: the
    method of a model whose window was removed, or that was given one.
    """

    name: str
    label: str
    block: Callable[[Any, Any], BlockConfig | tuple[BlockConfig, ...]]  # of a `TransformerConfig`
    layers: Literal["fast", "all", "none"] = "fast"
    settings: type[Settings] | None = None
    reference: Reference | None = None
    twin: str | None = None  # None: the same method


METHODS = Registry[Method]("method", lambda method: method.settings, Settings)
method_named, register = METHODS.named, METHODS.add
