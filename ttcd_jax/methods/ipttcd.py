"""The IP-TTCD MLP: a SwiGLU whose down projection stores the difference between the features of a
teacher with a long window and a student with a short one.

    z_target = conv_T(feat(x)),  z_student = conv_S(feat(t))             both inside their chunk
    e = sigmoid(t . b) * ((z_target - z_student) W_base) P,  k = z_student / |z_student|
    W_i = W_base + eta * sum over earlier chunks of k^T e,   y = z_out W_i

x is the teacher's normed hidden state, t the student's; W_base is the down projection [F, D].
"""

import functools
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels import short_conv_residual
from ttcd_kernels.normalize import l2_normalize
from ttcd_kernels.short_conv import Implementation, short_conv

from ttcd_jax.axes import param
from ttcd_jax.config import NonNegativeFloat, Positive
from ttcd_jax.errors import DataError, UserError
from ttcd_jax.memory.prefix import PrefixOptions, Writes
from ttcd_jax.memory.protocol import ChunkedMemory
from ttcd_jax.memory.running import RenormalizedMemory, Views
from ttcd_jax.methods import in_place, registry
from ttcd_jax.nn.attention import DualWindowAttention, DualWindowConfig
from ttcd_jax.nn.block import Block, BlockConfig, Names
from ttcd_jax.nn.linear import normal_param, weight_product
from ttcd_jax.nn.row import Hidden
from ttcd_jax.precision import Precision


class MemoryConfig(in_place.PrefixSettings):
    """The settings of IP-TTCD. The defaults are the paper's from-scratch recipe, whose teacher
    convolution, through which the model reads, begins at zero. Continued training starts exactly at
    the base model: `output="teacher_raw"`, `normalizes_keys=False`, teacher convolution at
    identity, student convolution at zero.

    `has_teacher_conv`, `has_student_conv`: the convolutions of the features, which begin as
    `teacher_conv_init` and `student_conv_init`. `has_token_rate`: the gate sigmoid(t . b) on
    errors, which `gate` "teacher" computes from x (not published). `error`: what is written, the
    difference of the teacher's features from the student's, the same before their convolutions
    ("gap"), or one of them, as a control; not published is "learned", feat(x) through a matrix
    [F, D] of its own, from zero, in place of W_base. `normalizes_keys`, `normalizes_errors`: to
    norm 1, where
    `zero_slope` is the gradient at a zero vector (published: 1e6). `output`: the features read
    through the memory, the teacher's after its convolution, before it, or the student's.
    `renorm_chunks`: |W| is held at |W_base|, in groups of so many chunks. `orthogonalizes_updates`:
    Newton-Schulz on every delta_w. `conv_implementation`: of the convolutions, by its name in
    `ttcd_kernels`.
    """

    has_teacher_conv: bool = True
    has_student_conv: bool = True
    has_token_rate: bool = True
    gate: Literal["student", "teacher"] = "student"
    error: Literal["difference", "gap", "teacher", "student", "learned"] = "difference"
    normalizes_keys: bool = True
    normalizes_errors: bool = False
    output: Literal["teacher", "teacher_raw", "student"] = "teacher"
    teacher_conv_init: in_place.ConvInit = "zeros"
    student_conv_init: in_place.ConvInit = "normal"
    renorm_chunks: Positive | None = None
    orthogonalizes_updates: bool = False
    zero_slope: NonNegativeFloat = 1.0
    conv_implementation: Implementation = "auto"

    def validate(self) -> None:
        super().validate()
        is_prefix = self.form in ("auto", "blocked") and not self.folds_state
        if self.renorm_chunks is not None and not is_prefix:
            raise UserError(
                "renorm_chunks is its own loop: it knows neither another form than 'blocked' "
                "nor folds_state"
            )
        if self.renorm_chunks is not None and self.half_lives:
            raise UserError(
                "renorm_chunks holds the size of the memory, half_lives let it decay: set one of "
                "them"
            )
        if self.output == "teacher_raw" and not self.has_teacher_conv:
            raise UserError(
                "output 'teacher_raw' names features before a convolution that is off; "
                "use 'teacher'"
            )
        if self.gate == "teacher" and not self.has_token_rate:
            raise UserError("gate 'teacher' opens a gate that is off: set has_token_rate=True")
        if self.error == "learned" and self.has_proj:
            raise UserError("error 'learned' has a matrix of its own: set has_proj=False")
        if self.form == "attention" and self.orthogonalizes_updates:
            raise UserError("form 'attention' does not know orthogonalizes_updates")
        if self.corrects_errors and not self.normalizes_keys:
            raise UserError(
                "corrects_errors with normalizes_keys=False diverges: keys above norm 1 overshoot; "
                "set normalizes_keys=True"
            )
        if self.corrects_errors and (self.renorm_chunks or self.orthogonalizes_updates):
            raise UserError(
                "corrects_errors has its own update: it knows neither renorm_chunks nor "
                "orthogonalizes_updates"
            )

    @property
    def rules(self) -> dict[str, Any]:
        alone = f", errors of the {self.error} alone"
        words = ", learned values" if self.error == "learned" else alone
        return super().rules | {words: self.error != "difference"}

    @property
    def is_linear_in_proj(self) -> bool:
        return self.has_proj and not self.orthogonalizes_updates

    def options(self, precision: Precision) -> PrefixOptions:
        return super().options(precision)._replace(orthogonalizes=self.orthogonalizes_updates)


class IPTTCDConfig(in_place.InPlaceConfig):
    """An MLP with a memory in its down projection."""

    reference_names: ClassVar[Names] = in_place.InPlaceConfig.reference_names | {
        "ttt_teacher_conv.weight": ("teacher_conv", "conv"),
        "ttt_student_conv.weight": ("student_conv", "conv"),
        "b_proj": ("rate", "same"),
        "ttt_value.weight": ("value", "linear"),  # not in the reference
    }

    memory: MemoryConfig = MemoryConfig()

    @property
    def has_teacher(self) -> bool:
        return self.memory.error != "learned"

    @property
    def write_param(self) -> str | None:
        settings = self.memory
        is_linear = not (settings.normalizes_errors or settings.orthogonalizes_updates)
        return "value" if settings.error == "learned" and is_linear else super().write_param

    def flops(self, length: int) -> int | float:
        """Besides a SwiGLU: student gate and up, error, delta_w, the read of the memory (that of
        W_base is the SwiGLU's); and what errors need."""
        return (3 + 5) * self.mlp.unit_flops(length) + self.memory.error_flops(self.mlp, length)


class Features(NamedTuple):
    """Per-token features and gate, before the convolutions."""

    teacher: jax.Array
    student: jax.Array
    beta: jax.Array | None
    log_decay: jax.Array | None


# The features; z_target - z_student, z_target, and z_student, normalized if it is only a key.
Convolved = tuple[Features, jax.Array, jax.Array, jax.Array]


class IPTTCDMLP(in_place.InPlaceMLP[Features, Convolved], config=IPTTCDConfig):
    """(x, t) [B, T, D] -> y [B, T, D], any T: teacher and student. Parameters of SwiGLU plus P, b
    and the two convolutions."""

    settings: MemoryConfig

    def __init__(self, config: IPTTCDConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        settings, mlp = config.memory, config.mlp
        self._init_sum(rngs)
        if settings.has_token_rate:
            dtype = mlp.precision.param_dtype
            self.rate = normal_param(rngs, (mlp.dim,), ("embed",), mlp.init_std, dtype)
        if settings.error == "learned":
            zeros = jnp.zeros((mlp.hidden_dim, mlp.dim), mlp.precision.param_dtype)
            self.value = param(zeros, ("mlp", "embed"))
        if settings.has_teacher_conv:
            self.teacher_conv = self._init_conv(settings.teacher_conv_init, rngs, "mlp")
        if settings.has_student_conv:
            self.student_conv = self._init_conv(settings.student_conv_init, rngs, "mlp")
        if settings.has_teacher_conv or settings.has_student_conv:
            self.look_back, self.look_ahead = settings.num_taps - 1, settings.look_ahead
        is_convolved = {"teacher": settings.has_teacher_conv, "student": settings.has_student_conv}
        if is_convolved.get(settings.output):
            self.convolved_reads = f"output {settings.output!r}"

    def tokens(self, x: Hidden, t: Hidden) -> Features:
        beta, teacher = None, self.features(x)
        if self.settings.has_token_rate:
            view = t if self.settings.gate == "student" else x
            beta = jax.nn.sigmoid(jnp.einsum("BTD,D->BT", view, self.rate[...].astype(t.dtype)))
            beta = beta.astype(teacher.dtype)  # a caller's stream may be wider
        return Features(teacher, self.features(t), beta, self.log_decay(x))

    def convolved(self, tokens: Features, segments: Int[Array, "B C L"] | None) -> Convolved:
        settings = self.settings
        # The student's features are needed unnormalized where they read as well.
        normalizes = settings.normalizes_keys and settings.output != "student"
        return tokens, *short_conv_residual(
            tokens.teacher,
            tokens.student,
            *self._taps(),
            is_causal=settings.is_conv_causal,
            normalizes_keys=normalizes,
            zero_slope=settings.zero_slope,
            segment_ids=segments,
            implementation=settings.conv_implementation,
        )

    def operands(self, convolved: Convolved) -> tuple[Float[Array, "B C L F"], Writes]:
        """The update: to change its rule, change e and k here."""
        (teacher, student, beta, log_decay), difference, z_target, keys = convolved
        settings, dtype = self.settings, teacher.dtype
        z_out = {"teacher": z_target, "teacher_raw": teacher, "student": keys}[settings.output]
        if settings.normalizes_keys and settings.output == "student":
            keys = l2_normalize(keys, settings.zero_slope)
        values = {"teacher": z_target, "student": z_target - difference, "difference": difference}
        values |= {"gap": teacher - student, "learned": teacher}
        through = self.value if settings.error == "learned" else self.down
        errors = weight_product(values[settings.error], through[...].astype(dtype))
        if settings.normalizes_errors:
            errors = l2_normalize(errors, settings.zero_slope)
        if beta is not None:
            errors = errors * beta[..., None]
        if settings.has_proj:
            errors = weight_product(errors, self.proj[...].astype(dtype))
        return z_out, Writes(keys, errors, log_decay, beta if settings.corrects_errors else None)

    def _taps(self) -> tuple[jax.Array, jax.Array]:
        """Those of teacher and student; a convolution that is off is the identity."""
        settings = self.settings
        identity = in_place.identity_taps(settings, self.config.hidden_dim)
        teacher = self.teacher_conv[...] if settings.has_teacher_conv else identity
        return teacher, self.student_conv[...] if settings.has_student_conv else identity

    def without_gap(self, convolved: Convolved, segments: Int[Array, "B C L"] | None) -> Writes:
        # By linearity of the student's convolution.
        features, difference, z_target, keys = convolved
        gap, is_causal = features.teacher - features.student, self.settings.is_conv_causal
        gap = short_conv(gap, self._taps()[1], is_causal=is_causal, segment_ids=segments)
        features = features._replace(student=features.teacher)
        return self.operands((features, difference - gap, z_target, keys))[1]

    def read_scale(self, has_gap: bool) -> Float[Array, " F"]:
        source, _, is_raw = self.settings.output.partition("_")
        if source == "student" and has_gap:
            raise UserError(
                "output 'student' reads the features of a stream under a second window, and a "
                "plain model has one: train with output 'teacher_raw'"
            )
        return jnp.ones(self.config.hidden_dim) if is_raw else self.own_tap(f"{source}_conv")

    def views(self, convolved: Convolved) -> Views:
        # Keys may be normalized, so the student's features are z_target less the difference.
        features, difference, z_target, _ = convolved
        if self.settings.error == "gap":
            return features.teacher, features.student
        return z_target, z_target - difference

    def memory(self, length: int) -> ChunkedMemory:
        if (group := self.settings.renorm_chunks) is None:
            return super().memory(length)
        options = self.settings.options(self.config.precision)
        return RenormalizedMemory(self.w_base(), options, group)


class IPTTCDBlockConfig(BlockConfig):
    """`mixer`: attention under two windows; `mlp`: one that learns from their difference."""

    mixer: DualWindowConfig
    mlp: in_place.InPlaceConfig


class IPTTCDBlock(Block):
    """A block with a memory. The teacher's residual r = h + attention_T continues; with x = norm(r)
    and t = norm(h + attention_S), same norm, the MLP reads and writes its memory: r + MLP(x, t)."""

    config_class = IPTTCDBlockConfig
    mixer: DualWindowAttention
    mlp: in_place.InPlaceMLP


def dual_window_block(
    mlp: type[in_place.InPlaceConfig], config: registry.ModelConfig, settings: Any
) -> IPTTCDBlockConfig:
    """The block of this MLP, which reads teacher and student from attention under two windows."""
    mixer = DualWindowConfig(attention=config.attention(), student_window=config.student_window)
    return IPTTCDBlockConfig(mixer=mixer, mlp=mlp(mlp=config.mlp(), memory=settings))


_CONV_INIT = {"zero": "zeros", "identity": "identity", "random": "normal"}


def _read(source: registry.Source) -> dict[str, Any]:
    output = source.values.get("ttt_output_source", "teacher")
    if output not in ("teacher", "student"):
        raise DataError(f"ttt_output_source={output!r} is neither 'teacher' nor 'student'")
    has_conv = source.flag("ttt_teacher_conv", True)
    is_raw = has_conv and not source.flag("ttt_output_use_teacher_conv", True)
    if is_raw and output == "teacher":
        output = "teacher_raw"
    group = source.positive("ttt_update_every", 4)
    chunk, visible = source.positive("ttt_chunk", 8192), source.positive("ttt_visible_chunks", 1)
    return {
        "memory.output": output,
        "memory.renorm_chunks": group if source.flag("ttt_weight_renorm", False) else None,
        "student_window": chunk * visible,
    }


def _write(config: registry.ModelConfig, memory: MemoryConfig) -> dict[str, Any]:
    if config.student_window % memory.chunk_size:
        raise UserError(
            f"the reference's student window is a multiple of the chunk, this model's "
            f"{config.student_window} is not a multiple of {memory.chunk_size}"
        )
    return {
        "ttt_output_source": "student" if memory.output == "student" else "teacher",
        "ttt_output_use_teacher_conv": memory.output != "teacher_raw",
        "ttt_weight_renorm": memory.renorm_chunks is not None,
        "ttt_update_every": memory.renorm_chunks or 4,
        "ttt_visible_chunks": config.student_window // memory.chunk_size,
    }


_KEYS = (
    *registry.FAST_KEYS,
    registry.Key("ttt_chunk", "memory.chunk_size", 8192),
    registry.Key("ttt_lr", "memory.eta", 0.3),
    registry.Key("ttt_proj", "memory.has_proj", True),
    registry.Key("ttt_proj_init", "memory.proj_init", "diagonal", registry.PROJ_INIT),
    registry.Key("ttt_teacher_conv", "memory.has_teacher_conv", True),
    registry.Key("ttt_student_conv", "memory.has_student_conv", True),
    registry.Key("ttt_conv_kernel_size", "memory.num_taps", 5),
    registry.Key("ttt_conv_causal", "memory.is_conv_causal", True),
    registry.Key("ttt_teacher_conv_init", "memory.teacher_conv_init", "zero", _CONV_INIT),
    registry.Key("ttt_student_conv_init", "memory.student_conv_init", "zero", _CONV_INIT),
    registry.Key("dynamic_lr", "memory.has_token_rate", True),
    registry.Key("ttt_normalize_student_features", "memory.normalizes_keys", True),
    registry.Key("ttt_norm_proj_diff", "memory.normalizes_errors", False),
    registry.Key("use_muon", "memory.orthogonalizes_updates", False),
)
_TYPES = ("ipttcdv9", "ipttcdv9_lowcopy", "ipttcdv8", "ipttcd")
_FIXED = registry.ATTENTION_FIXED
_REFERENCE = registry.Reference(_TYPES, _KEYS, _FIXED, _read, _write, has_switch=True)
_BLOCK = functools.partial(dual_window_block, IPTTCDConfig)
registry.register(registry.Method("ipttcd", "IP-TTCD", _BLOCK, "fast", MemoryConfig, _REFERENCE))
