"""Variants of one run, which share its parameters: attention, form of the memory's read, precision,
path. The path is how tokens are read: `forward` takes whole rows through the training forward pass,
`streamed` pieces of them through the state of `ttcd_jax.inference`, `decoded` one after another."""

import functools
from typing import Any, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.errors import NonFiniteError, UserError
from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.inference.prefill import stream
from ttcd_jax.inference.state import start_state
from ttcd_jax.memory.prefix import Form
from ttcd_jax.methods.in_place import PrefixSettings
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.train.state import with_params

_PIECE_SIZES = {"forward": None, "streamed": 2048, "decoded": 1}  # unless a part states another
_GROUPS = {
    "attention": ("xla", "triton", "mosaic"),
    "form": get_args(Form),
    "compute": ("float32", "bfloat16", "float64"),
    "path": tuple(_PIECE_SIZES),
}


class Variant(NamedTuple):
    """A variant of a run; None: as in the run's configuration. `piece_size`: the tokens of a row
    that are read at once; None: all."""

    attention: Any = None
    form: Form | None = None
    compute: Any = None
    piece_size: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """The variant of parts as in "xla,float32,streamed:512", at most one of each kind. Raises
        `UserError` with the part and the choices."""
        chosen: dict[str, Any] = {}
        for item in text.split(","):
            name, colon, size = item.partition(":")
            group = next((group for group, names in _GROUPS.items() if name in names), None)
            if group is None:
                choices = "; ".join(f"{x}: {', '.join(names)}" for x, names in _GROUPS.items())
                raise UserError(f"{item!r} is not a part of a variant ({choices})")
            if group in chosen:
                raise UserError(f"{chosen[group]!r} and {name!r} are both {group}: name one")
            if colon and not (name == "streamed" and size.isdecimal() and int(size)):
                raise UserError(f"{item!r}: only streamed takes a number of tokens, streamed:512")
            chosen[group] = name
            if group == "path":
                chosen["piece_size"] = int(size) if colon else _PIECE_SIZES[name]
        chosen.pop("path", None)
        return cls(**chosen)

    def __str__(self) -> str:
        path = {None: "forward", 1: "decoded"}.get(self.piece_size, f"streamed:{self.piece_size}")
        return ", ".join(filter(None, (*self[:3], path)))

    def applied(self, config: TransformerConfig) -> TransformerConfig:
        """The model's configuration in this variant. Raises `UserError` for a form that its memory
        does not have, and for float64 when it is off in JAX."""
        precision, memory = config.precision, config.settings
        if self.form is not None:
            if not isinstance(memory, PrefixSettings):
                raise UserError(
                    f"method {config.method!r} has no memory with forms: leave {self.form!r} out"
                )
            config = config.replace(memory=memory.replace(form=self.form))
        if self.compute == "float64":
            if not jax.config.jax_enable_x64:
                raise UserError("float64 is off in JAX: set JAX_ENABLE_X64=1, or take float32")
            precision = precision.replace(state="float64")
        return config.replace(
            attention_implementation=self.attention or config.attention_implementation,
            precision=precision.replace(compute=self.compute or precision.compute),
        )


class Computed:
    """A run in one variant; `model` is the run's."""

    def __init__(self, variant: Variant, model: Transformer) -> None:
        self.variant, self.config = variant, variant.applied(model.config)
        self.model = with_params(self.config, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        self.dtype = self.config.precision.compute_dtype

    @functools.cached_property
    def unstacked(self) -> InferenceModel:
        """The model with its parameters stored layer by layer."""
        return inference_model(self.model)

    def hidden(self, tokens: Int[np.ndarray, "B T"]) -> Float[Array, "B T D"]:
        """The input of the head, for whole rows of one document each. Raises `NonFiniteError` with
        the first position."""
        if (size := self.variant.piece_size) is None:
            hidden = _forward(*nnx.split(self.model), tokens)
        else:
            state = start_state(self.unstacked, len(tokens), max_length=tokens.shape[1])
            pieces = stream(self.unstacked, state, tokens, piece_size=size)
            hidden = jnp.concatenate([h[:, : counts[0]] for counts, h, _ in pieces], axis=1)
        if len(broken := np.argwhere(~np.asarray(jnp.isfinite(hidden).all(-1)))):
            row, position = broken[0]
            raise NonFiniteError(
                f"{self.variant} in {self.dtype}: the hidden state of row {row}, position "
                f"{position} is not finite; try a wider precision"
            )
        return hidden


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    graph: nnx.GraphDef[Transformer], params: nnx.GraphState, tokens: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    return nnx.merge(graph, params).forward(tokens)[0]
