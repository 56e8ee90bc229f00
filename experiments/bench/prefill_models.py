"""The models of the prefill benchmark: one shape, one set of random parameters per method.

"Naive" IP-TTCD computes the same with its fused operations taken apart: two single-window
attentions, each over all of its own keys, and two convolutions whose results stand in memory.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import jax
from flax import nnx
from ttcd_kernels.dispatch import Candidate, choose
from ttcd_kernels.dual_window import api as dual_window
from ttcd_kernels.normalize import l2_normalize
from ttcd_kernels.short_conv import api as short_conv_api
from ttcd_kernels.short_conv.xla import short_conv
from ttcd_kernels.windows import Results, Windows

from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.models.catalog import METHODS, TransformerConfig
from ttcd_jax.models.transformer import Transformer
from ttcd_jax.train.state import with_params


class Competitor(NamedTuple):
    """A model of the tables: its label, its method, and whether its operations are taken apart."""

    label: str
    method: str
    is_naive: bool = False


COMPETITORS = {
    "swa": Competitor(METHODS["swa"].label, "swa"),
    "ipttt": Competitor(METHODS["ipttt"].label, "ipttt"),
    "ipttcd_naive": Competitor(f"{METHODS['ipttcd'].label}, naive", "ipttcd", is_naive=True),
    "ipttcd": Competitor(METHODS["ipttcd"].label, "ipttcd"),
}


class Models:
    """The competitors in one shape. Parameters are drawn once per method, with seed 0: a window
    changes none."""

    def __init__(self, shape: TransformerConfig) -> None:
        self._shape = shape
        self._params = functools.cache(self._drawn)

    def config(self, name: str, window: int) -> TransformerConfig:
        """Of a competitor under a window, of which the student sees half."""
        competitor = COMPETITORS[name]
        return self._shape.replace(
            method=competitor.method,
            window=window,
            student_window=max(window // 2, 1),
            attention_implementation=_NAIVE if competitor.is_naive else "auto",
        )

    def build(self, name: str, window: int) -> InferenceModel:
        config = self.config(name, window)
        return inference_model(with_params(config, self._params(config.method)))

    def _drawn(self, method: str) -> dict[str, Any]:
        def draw():
            model = Transformer(self._shape.replace(method=method), rngs=nnx.Rngs(0))
            return nnx.to_pure_dict(nnx.state(model, nnx.Param))

        return jax.jit(draw)()


# The name under which naive configurations ask for their attention; `operations` says what it is.
_NAIVE = "lse"


def operations(config: TransformerConfig) -> contextlib.AbstractContextManager[None]:
    """Where a model has to be compiled: for a naive configuration, its operations taken apart."""
    is_naive = config.attention_implementation == _NAIVE
    return _taken_apart() if is_naive else contextlib.nullcontext()


@contextlib.contextmanager
def _taken_apart() -> Iterator[None]:
    attention, convs = Candidate(_two_attentions), Candidate(_two_convs)
    with (
        mock.patch.dict(dual_window.CANDIDATES, {_NAIVE: attention}),
        mock.patch.dict(short_conv_api.CANDIDATES, {"naive": convs}, clear=True),
    ):
        yield


def _two_attentions(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None, windows: Windows
) -> Results:
    """Same contract as `dual_window.reference.dual_window`: the implementation that "auto" takes,
    called for each window by itself."""
    attend = choose("naive attention", "auto", dual_window.CANDIDATES, q, k, v, segment_ids)
    found = {
        window: attend(q, k, v, segment_ids, Windows(window, window, windows.scale))
        for window in dict.fromkeys(windows[:2])
    }
    (_, teacher, _, teacher_lse) = found[windows.teacher]
    (_, student, _, student_lse) = found[windows.student]
    return teacher, student, teacher_lse, student_lse


def _two_convs(
    z_teacher: jax.Array,
    z_student: jax.Array,
    teacher_taps: jax.Array,
    student_taps: jax.Array,
    segment_ids: jax.Array | None,
    is_causal: bool,
    normalizes_keys: bool,
    zero_slope: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Same contract as `short_conv.reference.short_conv_residual`; both convolutions stand in
    memory before anything is made of them."""
    convolve = functools.partial(short_conv, is_causal=is_causal, segment_ids=segment_ids)
    target, student = jax.lax.optimization_barrier(
        (convolve(z_teacher, teacher_taps), convolve(z_student, student_taps))
    )
    key = l2_normalize(student, zero_slope) if normalizes_keys else student
    return target - student, target, key
