"""Runs as models of lm-evaluation-harness' own command."""

import os
from collections.abc import Sequence
from typing import Any

from ttcd_jax.eval.harness import ScorerLM
from ttcd_jax.eval.scorer import Scorer
from ttcd_jax.run.directory import load_run


class RunLM(ScorerLM):
    """The model of a run directory at its newest checkpoint, or at `step`, by the arguments of
    `--model_args`; `param`: a change of the model, or a list of them, as in `load_run`."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        step: int | None = None,
        batch_size: int | str = 16,
        param: str | Sequence[str] = (),
        **ignored: Any,
    ) -> None:
        """`ignored`: what the harness passes to every model, as a device."""
        run = load_run(run_dir, step, [param] if isinstance(param, str) else param)
        size = int(batch_size)
        super().__init__(Scorer(run.model, run.tokenizer, batch_size=size, name="lm_eval"))

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "RunLM":
        """The harness passes its own batch_size too: the one in `--model_args` counts."""
        return cls(**(additional_config or {}) | arg_dict)
