"""Ways to compute one run: attention, form of the memory's read, precision, path.

All ways of a run share its parameters. The path is how tokens are read: `forward` takes whole
rows through the training forward pass, `streamed` takes pieces of them through the state of
`ttcd_jax.inference`, `decoded` one token after another.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from ttcd_jax.config import Config, Positive
from ttcd_jax.errors import NonFiniteError, UserError
from ttcd_jax.inference.decode import decode
from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.inference.prefill import prefill, stream
from ttcd_jax.inference.state import start_state, state_bytes
from ttcd_jax.memory.prefix import Form
from ttcd_jax.methods.in_place import PrefixSettings
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.train.state import with_params

AttentionName = Literal["xla", "triton", "mosaic"]
Compute = Literal["float32", "bfloat16", "float64"]
TokenPath = Literal["forward", "streamed", "decoded"]

_GROUPS = {"attention": AttentionName, "form": Form, "compute": Compute, "path": TokenPath}
_PIECE_SIZES = {"forward": None, "streamed": 2048, "decoded": 1}  # unless the way states another


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way(Config):
    """One way to compute a run; None: as in the run's configuration. `piece_size`: the tokens of a
    row that are read at once; None: all."""

    attention: AttentionName | None = None
    form: Form | None = None
    compute: Compute | None = None
    piece_size: Positive | None = None

    @property
    def path(self) -> TokenPath:
        names: dict[int | None, TokenPath] = {None: "forward", 1: "decoded"}
        return names.get(self.piece_size, "streamed")

    def applied(self, config: TransformerConfig) -> TransformerConfig:
        """The model's configuration under this way. Raises `UserError` for a form that its memory
        does not have, and for float64 when it is off in JAX."""
        changes: dict[str, Any] = {}
        if self.attention is not None:
            changes["attention_implementation"] = self.attention
        if self.form is not None:
            if not isinstance(config.settings, PrefixSettings):
                raise UserError(
                    f"method {config.method!r} has no memory with forms: leave {self.form!r} out"
                )
            changes["memory"] = config.settings.replace(form=self.form)
        if self.compute == "float64" and not jax.config.jax_enable_x64:
            raise UserError("float64 is off in JAX: set JAX_ENABLE_X64=1, or take float32")
        if self.compute is not None:
            state = {"state": "float64"} if self.compute == "float64" else {}
            changes["precision"] = config.precision.replace(compute=self.compute, **state)
        return config.replace(**changes)

    def resolved(self, config: TransformerConfig) -> dict[str, Any]:
        """The parts of the way for a run of `config`, by name, for JSON."""
        applied = self.applied(config)
        return {
            "attention": applied.attention_implementation,
            "form": getattr(applied.settings, "form", None),
            "compute": applied.precision.compute,
            "path": self.path,
            "piece_size": self.piece_size,
        }


def parse_way(items: Sequence[str]) -> Way:
    """The way with parts such as `xla`, `float32`, `streamed:512`, at most one of each kind. Raises
    `UserError` with the part and the choices."""
    chosen: dict[str, Any] = {}
    piece_size = None
    for item in items:
        name, colon, size = item.partition(":")
        group = next((group for group, names in _GROUPS.items() if name in get_args(names)), None)
        if group is None:
            choices = "; ".join(f"{key}: {', '.join(get_args(_GROUPS[key]))}" for key in _GROUPS)
            raise UserError(f"{item!r} is no part of a way to compute ({choices})")
        if group in chosen:
            raise UserError(f"{chosen[group]!r} and {name!r} are both {group}: name one")
        if colon and not (name == "streamed" and size.isdecimal()):
            raise UserError(f"{item!r}: only streamed takes a number of tokens, streamed:512")
        chosen[group] = name
        if group == "path":
            piece_size = int(size) if colon else _PIECE_SIZES[name]
    chosen.pop("path", None)
    return Way(piece_size=piece_size, **chosen)


class Computed:
    """A run computed one way; `model` is the run's, whose parameters it shares."""

    def __init__(self, way: Way, model: Transformer) -> None:
        self.way, self.config = way, way.applied(model.config)
        self.model = with_params(self.config, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
        self._graph, self._params = nnx.split(self.model)

    @functools.cached_property
    def unstacked(self) -> InferenceModel:
        """The model with its parameters stored layer by layer."""
        return inference_model(self.model)

    def block(self, layer: int) -> tuple[nnx.GraphDef, nnx.GraphState]:
        """(graph, parameters) of the block of one layer."""
        return self.unstacked.blocks[layer], self.unstacked.layers[layer]

    def check(self, num_rows: int, length: int, *, decodes: bool) -> None:
        """Raises before any computation: `ttcd_kernels.dispatch.Unsupported` for a kernel that
        cannot run here, `UserError` for a model that has no state or (`decodes`) cannot decode."""
        tokens = jax.ShapeDtypeStruct((num_rows, length), jnp.int32)
        jax.eval_shape(functools.partial(_forward, self._graph), self._params, tokens)
        if decodes or self.way.piece_size is not None:
            state_bytes(self.config, num_rows, length)

    @property
    def dtype(self) -> np.dtype:
        return jnp.dtype(self.config.precision.compute)

    def hidden(self, tokens: np.ndarray) -> Float[Array, "B T D"]:
        """The input of the head, for whole rows of one document each. Raises `NonFiniteError` with
        the first position."""
        if (size := self.way.piece_size) is None:
            hidden = _forward(self._graph, self._params, tokens)
        else:
            state = start_state(self.unstacked, len(tokens), max_length=tokens.shape[1])
            pieces = stream(self.unstacked, state, tokens, piece_size=size)
            hidden = jnp.concatenate([h[:, : counts[0]] for counts, h, _ in pieces], axis=1)
        is_finite = np.asarray(jnp.isfinite(hidden).all(-1))
        if not is_finite.all():
            row, position = np.argwhere(~is_finite)[0]
            raise NonFiniteError(
                f"{self.way.path} in {self.dtype}: the hidden state of row {row}, position "
                f"{position} is not finite; try a wider precision"
            )
        return hidden

    def greedy(
        self, prompts: Sequence[np.ndarray], num_tokens: int, length: int, draft: np.ndarray
    ) -> np.ndarray:
        """The greedy continuation of every prompt, [B, num_tokens] int32; `length` is the most
        tokens that a prompt and its continuation have.

        The forward path passes whole rows until a pass confirms every token it was given, starting
        from `draft` [B, num_tokens]: later tokens change no earlier position, so every pass fixes
        at least one more token, and the result is that of one pass per token.
        """
        lengths = np.array([len(prompt) for prompt in prompts])
        tokens = np.zeros((len(prompts), length), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = prompt
        if (size := self.way.piece_size) is None:
            return self._confirmed(tokens, lengths, draft)
        state = start_state(self.unstacked, len(tokens), max_length=length)
        logits, state = prefill(self.unstacked, state, tokens, lengths, piece_size=size)
        outputs = [jnp.argmax(logits, -1).astype(jnp.int32)]
        for _ in range(num_tokens - 1):
            logits, state = decode(self.unstacked, state, outputs[-1])
            outputs.append(jnp.argmax(logits, -1).astype(jnp.int32))
        return np.stack(jax.device_get(outputs), axis=1)

    def _confirmed(self, tokens: np.ndarray, lengths: np.ndarray, draft: np.ndarray) -> np.ndarray:
        num_tokens = draft.shape[1]
        rows = np.arange(len(tokens))[:, None]
        positions = lengths[:, None] + np.arange(num_tokens)
        for _ in range(num_tokens + 1):
            tokens[rows, positions] = draft
            hidden = _forward(self._graph, self._params, tokens)[rows, positions - 1]
            output = np.asarray(self.model.logits(hidden).argmax(-1), np.int32)
            if (output == draft).all():
                return output
            draft = output
        raise AssertionError("a later token changed the prediction at an earlier position")


@functools.partial(jax.jit, static_argnums=0)
def _forward(
    graph: nnx.GraphDef[Transformer], params: nnx.GraphState, tokens: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    return nnx.merge(graph, params).forward(tokens)[0]
