"""Fast layers in the forms of their memory: loss and gradient of a model of `num_layers` of them
and 256 vocabulary entries, on one row of random tokens."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from ttcd_kernels import measure
from ttcd_kernels.measure import MIB, MILLISECOND, TERA, Row, over

from experiments.studies.bench.case import Case, loaded, why_not_run
from ttcd_jax.config import NonNegativeFloat, Positive
from ttcd_jax.memory.prefix import Form
from ttcd_jax.methods.ipttcd import MemoryConfig
from ttcd_jax.models.config import Remat, TransformerConfig
from ttcd_jax.run.config import RunConfig
from ttcd_jax.train.flops import training_flops_per_token
from ttcd_jax.train.loss import summed_loss
from ttcd_jax.train.state import abstract_params, init_params, with_params

_SMALL = ("TransformerConfig.dim=16", "TransformerConfig.mlp_dim=32")
_SMALL += ("MemoryConfig.corrects_errors=False",)  # which has no forms


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer(Case):
    """Sizes that are no option are those of the file's model. FLOPs are the method's, whatever the
    form."""

    gin: str = "ipttcd_340m.gin"
    param: tuple[str, ...] = ()
    num_layers: Positive = 1
    lengths: tuple[Positive, ...] = (32768,)
    forms: tuple[Form, ...] = ("blocked", "associative", "attention")
    remat: tuple[Remat, ...] = ("none",)
    rounds: Positive = 3
    max_seconds: NonNegativeFloat = 60

    quick: ClassVar[Row] = {"gin": "recall.gin", "param": _SMALL, "lengths": (64,), "rounds": 1}

    def tables(self) -> Iterator[list[Row]]:
        """One per length."""
        config = loaded(RunConfig, self.gin, self.param).model
        fast: Any = {"num_layers": self.num_layers, "fast_layers": (*range(self.num_layers),)}
        config = config.replace(vocab_size=256, **fast)
        settings = config.settings
        assert isinstance(settings, MemoryConfig)
        for length in self.lengths:
            calls, rows = {}, {}
            shape = (1, length)
            tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, shape, np.int32))
            flops = length * training_flops_per_token(config, length)
            for form, remat in itertools.product(self.forms, self.remat):
                # The published start leaves the memory's output zero, and zeros run faster.
                memory = settings.replace(form=form, teacher_conv_init="identity")
                model = config.replace(memory=memory, remat=remat)
                compiled = _gradient(model, length)
                note = why_not_run(measure.needed_bytes(compiled), flops, self.max_seconds)
                if not note:
                    params = jax.jit(functools.partial(init_params, model, 0))()
                    calls[form, remat] = functools.partial(compiled, params, tokens)
                size = measure.temp_bytes(compiled)
                row: Row = {"tokens": length, "form": form, "remat": remat, "ms": None}
                row |= {"temp MiB": size / MIB, "temp bytes/token": size / length}
                rows[form, remat] = row | {"TFLOP": flops / TERA, "note": note}
            for key, seconds in measure.median_seconds(calls, self.rounds).items():
                rows[key]["ms"] = over(seconds, MILLISECOND)
            yield list(rows.values())


def _gradient(config: TransformerConfig, length: int) -> jax.stages.Compiled:
    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        model = with_params(config, params)
        hidden, _ = model.forward(tokens)
        return summed_loss(hidden, model.head_weight(), tokens, jnp.ones(tokens.shape, bool))

    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return jax.jit(jax.value_and_grad(loss)).lower(abstract_params(config), tokens).compile()
