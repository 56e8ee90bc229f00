"""IP-TTCD that writes other combinations of the two views.

    python -m experiments.study --import=experiments.studies.gap_values --gin=study/gap_values.gin

`ipttcd_shared_taps` has the teacher's taps in both views, e = conv_T(feat(x) - feat(t)).
`ipttcd_less_mean` writes errors less the mean of their document in the chunk. `ipttcd_two_values`
writes under the key of equal windows both their value and the gap, with a scale s [F], from 1:

    e = conv_T(feat(x)) - conv_S(feat(x)) + s (feat(x) - feat(t)),  k = conv_S(feat(x))

`ipttcd_value_and_teacher` and `ipttcd_value_and_student` are its controls, with feat(x) alone and
-feat(t) alone in place of the gap, under the same gate.
"""

import functools
from typing import NoReturn

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int
from ttcd_kernels.short_conv import short_conv

from ttcd_jax.axes import param
from ttcd_jax.errors import UserError
from ttcd_jax.memory.prefix import Writes
from ttcd_jax.methods.ipttcd import (
    IPTTCDMLP,
    Convolved,
    Features,
    IPTTCDConfig,
    MemoryConfig,
    dual_window_block,
)
from ttcd_jax.methods.registry import Method, register

type Segments = Int[Array, "B C L"] | None


class SharedTapsConfig(IPTTCDConfig):
    pass


class LessMeanConfig(IPTTCDConfig):
    pass


class TwoValuesConfig(SharedTapsConfig):
    pass


class ValueAndTeacherConfig(TwoValuesConfig):
    pass


class ValueAndStudentConfig(TwoValuesConfig):
    pass


class SharedTapsMLP(IPTTCDMLP, config=SharedTapsConfig):
    def gap(self, tokens: Features, segments: Segments) -> Float[Array, "B C L F"]:
        gap, is_causal = tokens.teacher - tokens.student, self.settings.is_conv_causal
        return short_conv(gap, self._taps()[0], is_causal=is_causal, segment_ids=segments)

    def convolved(self, tokens: Features, segments: Segments) -> Convolved:
        _, _, z_target, keys = super().convolved(tokens, segments)
        return tokens, self.gap(tokens, segments), z_target, keys

    def without_gap(self, convolved: Convolved, segments: Segments) -> Writes:
        tokens, difference, z_target, keys = convolved
        equal = tokens._replace(student=tokens.teacher)
        difference += self.gap(equal, segments) - self.gap(tokens, segments)
        return self.operands((equal, difference, z_target, keys))[1]


class TwoValuesMLP(SharedTapsMLP, config=TwoValuesConfig):
    def __init__(self, config: IPTTCDConfig, *, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs=rngs)
        ones = jnp.ones(config.mlp.hidden_dim, config.mlp.precision.param_dtype)
        self.gap_scale = param(ones, ("mlp",))

    def second(self, tokens: Features) -> Float[Array, "B C L F"]:
        return tokens.teacher - tokens.student

    def gap(self, tokens: Features, segments: Segments) -> Float[Array, "B C L F"]:
        second = self.second(tokens)
        return second * self.gap_scale[...].astype(second.dtype)

    def convolved(self, tokens: Features, segments: Segments) -> Convolved:
        equal = tokens._replace(student=tokens.teacher)
        _, difference, z_target, keys = IPTTCDMLP.convolved(self, equal, segments)
        return tokens, difference + self.gap(tokens, segments), z_target, keys


class ValueAndTeacherMLP(TwoValuesMLP, config=ValueAndTeacherConfig):
    def second(self, tokens: Features) -> Float[Array, "B C L F"]:
        return tokens.teacher


class ValueAndStudentMLP(TwoValuesMLP, config=ValueAndStudentConfig):
    def second(self, tokens: Features) -> Float[Array, "B C L F"]:
        return -tokens.student


class LessMeanMLP(IPTTCDMLP, config=LessMeanConfig):
    def convolved(self, tokens: Features, segments: Segments) -> Convolved:
        tokens, difference, z_target, keys = super().convolved(tokens, segments)
        student = tokens.student + _mean(tokens.teacher - tokens.student, segments)
        difference -= _mean(difference, segments)
        return tokens._replace(student=student), difference, z_target, keys

    def start(self, batch_size: int, max_length: int | None = None) -> NoReturn:
        raise UserError("errors less the mean of their chunk are not known token by token")


def _mean(x: Float[Array, "B C L F"], segments: Segments) -> Float[Array, "B C L F"]:
    """That of a token's document in its chunk."""
    ids = jnp.zeros(x.shape[:3], jnp.int32) if segments is None else segments
    same = (ids[..., :, None] == ids[..., None, :]).astype(x.dtype)
    return same @ x / same.sum(-1, keepdims=True)


for name, label, config in (
    ("ipttcd_shared_taps", "IP-TTCD of shared taps", SharedTapsConfig),
    ("ipttcd_less_mean", "IP-TTCD less the mean", LessMeanConfig),
    ("ipttcd_two_values", "IP-TTCD of two values", TwoValuesConfig),
    ("ipttcd_value_and_teacher", "IP-TTCD, value and teacher", ValueAndTeacherConfig),
    ("ipttcd_value_and_student", "IP-TTCD, value and student", ValueAndStudentConfig),
):
    block = functools.partial(dual_window_block, config)
    register(Method(name, label, block, settings=MemoryConfig))
