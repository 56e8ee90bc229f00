"""The models that read prompts: one shape, one set of random parameters per method.

`ipttcd_naive` is `ipttcd` without fused attention: one single-window attention per view, each over
all of its own keys.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax
from flax import nnx

from ttcd_jax.inference.model import InferenceModel, inference_model
from ttcd_jax.methods.in_place import InPlaceSettings
from ttcd_jax.methods.ip_ttt import TargetMemoryConfig
from ttcd_jax.models.config import TransformerConfig
from ttcd_jax.nn.attention import DualWindowAttention, DualWindowConfig
from ttcd_jax.nn.block import Views
from ttcd_jax.nn.row import Piece
from ttcd_jax.nn.windows import KVCache, attend_cached
from ttcd_jax.train.state import init_params, with_params

Competitor = Literal["swa", "ipttt", "ipttcd_naive", "ipttcd"]
_NAIVE = "_naive"


class Models:
    """Models of the shape of an IP-TTCD model. Parameters are drawn with seed 0, whatever the
    window."""

    def __init__(self, shape: TransformerConfig) -> None:
        compute = shape.precision.compute
        self._shape = shape.replace(precision=shape.precision.replace(param=compute))
        self._params = functools.cache(
            lambda method: jax.jit(lambda: init_params(self.config(method, 1), 0))()
        )

    def config(self, name: str, window: int) -> TransformerConfig:
        """The configuration of a model under the teacher's window; the student's is half."""
        method = name.removesuffix(_NAIVE)
        shape = self._shape.replace(window=window, student_window=max(window // 2, 1))
        if method == "swa":
            return shape.replace(method=method, fast_layers=(), memory=None)
        memory = shape.settings
        if method == "ipttt" and isinstance(memory, InPlaceSettings):
            # Causal and random, so that the memory can be read in pieces and its updates are not 0.
            options: Any = {"is_conv_causal": True, "conv_init": "normal"}
            memory = TargetMemoryConfig(chunk_size=memory.chunk_size, **options)
        return shape.replace(method=method, memory=memory)

    def build(self, name: str, window: int) -> InferenceModel:
        config = self.config(name, window)
        model = inference_model(with_params(config, self._params(config.method)))
        if name.endswith(_NAIVE):
            blocks = tuple(map(_unfused, model.blocks, model.layers))
            model = dataclasses.replace(model, blocks=blocks)
        return model


class _TwoCalls(DualWindowAttention):
    """One call of attention for the teacher's view and one for the student's."""

    def extend(
        self, x: jax.Array, piece: Piece, state: KVCache, student: jax.Array | None = None
    ) -> tuple[Views, KVCache]:
        q, k, v = self.project(x, piece.positions(x.shape[1]))

        def view(window: int | None) -> tuple[jax.Array, KVCache]:
            how = self.config.attention_implementation
            cut = dataclasses.replace(piece.cut, window=window)  # the halo may be longer
            (out,), after = attend_cached(q, k, v, piece._replace(cut=cut), state, (window,), how)
            return self.project_out(out), after

        (teacher, after), (student, _) = view(self.config.window), view(self.student_window)
        return Views(teacher, student), after


def _unfused(graph: nnx.GraphDef, params: Any) -> nnx.GraphDef:
    """The graph with unfused attention; parameters keep their names."""

    def naive() -> Any:
        block: Any = nnx.merge(graph, params)
        fused = block.mixer
        if isinstance(fused, DualWindowAttention):
            config = DualWindowConfig(attention=fused.config, student_window=fused.student_window)
            block.mixer = _TwoCalls(config, rngs=nnx.Rngs(0))
        return block

    return nnx.split(nnx.eval_shape(naive))[0]
