"""The IP-TTCD MLP: a SwiGLU whose down projection holds what the student's short window missed.

    z_target = conv_T(feat(x)),  z_student = conv_S(feat(t))             both inside their chunk
    e = sigmoid(t . b) * ((z_target - z_student) W_base) P,  k = z_student / |z_student|
    W_i = W_base + eta * sum over earlier chunks of k^T e,   y = z_out W_i

x is the teacher's normed hidden state, t the student's; W_base is the down projection [F, D].
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels import short_conv_residual
from ttcd_kernels.normalize import l2_normalize

from ttcd_jax.config import Config
from ttcd_jax.errors import UserError
from ttcd_jax.memory import prefix as scan
from ttcd_jax.memory.chunks import chunk_segments, from_chunks, to_chunks
from ttcd_jax.memory.delta import chunk_errors
from ttcd_jax.memory.running import chunked_memory, renormalized_memory, renormalized_rule
from ttcd_jax.methods.in_place import (
    ConvInit,
    FastWeightConfig,
    MemoryMLP,
    Remembered,
    identity_taps,
    look_ahead,
    reads_ahead,
)
from ttcd_jax.nn.linear import normal_param
from ttcd_jax.nn.mlp import MLPConfig
from ttcd_jax.sharding.memory import apply_memory
from ttcd_jax.sharding.recurrent import running_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(FastWeightConfig):
    """How the memory is written and read. The defaults are the paper's from-scratch recipe.

    A model trained from scratch reads through the teacher convolution, which starts at zero
    (published) or at the identity. Continued training starts at the base model exactly:
    `output="teacher_raw"`, `normalizes_keys=False`, teacher convolution at identity, student
    convolution at zero.
    """

    has_teacher_conv: bool = True
    has_student_conv: bool = True
    has_token_rate: bool = True
    normalizes_keys: bool = True
    normalizes_errors: bool = False
    # Which features are read through the memory: the teacher's behind its convolution, before it,
    # or the student's.
    output: Literal["teacher", "teacher_raw", "student"] = "teacher"
    teacher_conv_init: ConvInit = "zeros"
    student_conv_init: ConvInit = "normal"
    renorm_chunks: int | None = None  # hold |W| at |W_base|, in groups of so many chunks
    orthogonalizes_updates: bool = False  # Newton-Schulz on every delta_w
    zero_slope: float = 1.0  # gradient of a normalisation at a zero vector; published: 1e6

    def validate(self) -> None:
        super().validate()
        if self.renorm_chunks is not None and self.renorm_chunks < 1:
            raise UserError(f"MemoryConfig.renorm_chunks {self.renorm_chunks} must be at least 1")
        if self.renorm_chunks is not None and (
            self.form not in ("auto", "blocked") or self.folds_state
        ):
            raise UserError(
                "renorm_chunks is a loop of its own: it knows neither another form than 'blocked' "
                "nor folds_state"
            )
        if self.output == "teacher_raw" and not self.has_teacher_conv:
            raise UserError(
                "output 'teacher_raw' names features before a convolution that is off; "
                "use 'teacher'"
            )
        if self.form == "attention" and self.orthogonalizes_updates:
            raise UserError("form 'attention' does not know orthogonalizes_updates")


@dataclasses.dataclass(frozen=True, kw_only=True)
class IPTTCDConfig(Config):
    """An MLP with a memory in its down projection."""

    mlp: MLPConfig
    memory: MemoryConfig = MemoryConfig()


class _Tokens(NamedTuple):
    """What a token brings by itself."""

    z: jax.Array
    z_student: jax.Array
    beta: jax.Array | None


class _Convolved(NamedTuple):
    """The same behind the convolutions."""

    z_out: jax.Array
    keys: jax.Array
    difference: jax.Array
    beta: jax.Array | None


class IPTTCDMLP(MemoryMLP):
    """(x, t) [B, T, D] -> y [B, T, D], any T: teacher and student. Parameters of SwiGLU plus P, b
    and the two convolutions."""

    memory: MemoryConfig

    def __init__(self, config: IPTTCDConfig, *, rngs: nnx.Rngs):
        memory, mlp = config.memory, config.mlp
        super().__init__(mlp, memory, rngs=rngs)
        if memory.has_proj:
            self.proj = self._init_proj(memory, rngs)
        if memory.has_token_rate:
            dtype = mlp.precision.param_dtype
            self.rate = normal_param(rngs, (mlp.dim,), ("embed",), mlp.init_std, dtype)
        if memory.has_teacher_conv:
            self.teacher_conv = self._init_conv(memory, memory.teacher_conv_init, rngs, "mlp")
        if memory.has_student_conv:
            self.student_conv = self._init_conv(memory, memory.student_conv_init, rngs, "mlp")

    def _remember(self, x, t, segments, segment_ids) -> Remembered:
        memory = self.memory
        tokens = jax.tree.map(lambda x: to_chunks(x, memory.chunk_size), self._tokens(x, t))
        z_out, (keys, errors) = self._operands(self._convolved(tokens, segments))
        row = segment_ids, x.shape[1]
        beta = None if tokens.beta is None else from_chunks(tokens.beta, x.shape[1])
        return Remembered(*self._read(z_out, keys, errors, *row), beta)

    def _tokens(self, x, t) -> _Tokens:
        beta = None
        if self.memory.has_token_rate:
            beta = jax.nn.sigmoid(jnp.einsum("BTD,D->BT", t, self.rate[...].astype(t.dtype)))
        return _Tokens(self.features(x), self.features(t), beta)

    def _convolved(self, tokens: _Tokens, segments) -> _Convolved:
        memory = self.memory
        # Read through the student's features, they are needed as they are.
        normalizes = memory.normalizes_keys and memory.output != "student"
        z, z_student, beta = tokens
        difference, z_target, keys = self._residual(z, z_student, segments, normalizes)
        z_out = {"teacher": z_target, "teacher_raw": z, "student": keys}[memory.output]
        if memory.normalizes_keys and not normalizes:
            keys = l2_normalize(keys, memory.zero_slope)
        return _Convolved(z_out, keys, difference, beta)

    def _operands(self, convolved: _Convolved):
        memory, dtype = self.memory, convolved.z_out.dtype
        errors = chunk_errors(
            convolved.difference,
            self.down[...].astype(dtype),
            beta=convolved.beta,
            proj=self.proj[...].astype(dtype) if memory.has_proj else None,
            normalizes=memory.normalizes_errors,
            zero_slope=memory.zero_slope,
        )
        return convolved.z_out, (convolved.keys, errors)

    def _chunked(self, batch_size: int):
        memory, precision = self.memory, self.config.precision
        w_base = self.down[...].astype(precision.compute_dtype)
        rule = memory.rule(precision, orthogonalizes=memory.orthogonalizes_updates)
        if memory.renorm_chunks is None:
            start = jnp.zeros((batch_size, *w_base.shape), rule.state_dtype)
            return scan.chunked_memory(rule, w_base), start
        running = renormalized_rule(rule, w_base, memory.renorm_chunks)
        return chunked_memory(running), running.start(batch_size)

    @property
    def _look_back(self) -> int:
        memory = self.memory
        return memory.num_taps - 1 if memory.has_teacher_conv or memory.has_student_conv else 0

    @property
    def _look_ahead(self) -> int:
        has_conv = self.memory.has_teacher_conv or self.memory.has_student_conv
        return look_ahead(self.memory) if has_conv else 0

    def _check_causal(self) -> None:
        memory = self.memory
        is_convolved = {
            "teacher": memory.has_teacher_conv,
            "teacher_raw": False,
            "student": memory.has_student_conv,
        }[memory.output]
        if is_convolved and look_ahead(memory):
            raise reads_ahead("MemoryConfig", f"output {memory.output!r}")

    def keys(
        self, t: Float[Array, "B T D"], segment_ids: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B C L F"]:
        """What `forward` writes under, padding included."""
        segments = chunk_segments(segment_ids, self.memory.chunk_size)
        z = to_chunks(self.features(t), self.memory.chunk_size)
        return self._residual(z, z, segments, self.memory.normalizes_keys)[2]

    def _residual(self, z, z_student, segments, normalizes_keys: bool):
        """(z_target - z_student, z_target, k) behind both convolutions; one that is off passes
        everything through."""
        memory = self.memory
        taps = [identity_taps(memory, z.shape[-1])] * 2
        if memory.has_teacher_conv:
            taps[0] = self.teacher_conv[...]
        if memory.has_student_conv:
            taps[1] = self.student_conv[...]
        return short_conv_residual(
            z,
            z_student,
            *taps,
            is_causal=memory.is_conv_causal,
            normalizes_keys=normalizes_keys,
            zero_slope=memory.zero_slope,
            segment_ids=segments,
        )

    def _read(self, z_out, keys, errors, segment_ids, length):
        memory, w_base = self.memory, self.down[...].astype(z_out.dtype)
        rule = memory.rule(self.config.precision, orthogonalizes=memory.orthogonalizes_updates)
        group = memory.renorm_chunks
        if group is None:
            return apply_memory(rule, z_out, keys, errors, w_base, segment_ids, length)

        def make(chunks, w_base, mask):
            z, keys, errors = chunks
            return renormalized_memory(rule, z, keys, errors, w_base, mask, group)

        return running_memory(
            make,
            (z_out, keys, errors),
            w_base,
            segment_ids,
            length,
            memory.chunk_size,
        )
