"""lm-evaluation-harness' own command, `lm_eval`, with runs as models.

    ttcd lm_eval --model ttcd_jax --model_args run_dir=DIR,step=N,batch_size=16 --tasks hellaswag

`ttcd_lm_eval` is the same. All flags are the harness', and --import=MODULE: it imports a module of
the run.
"""

import inspect
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from absl import logging

from ttcd_jax.commands import cli  # says that the next ones are loaded
from ttcd_jax.config import closest
from ttcd_jax.errors import UserError
from ttcd_jax.measure.scorer import Scorer
from ttcd_jax.registry import import_modules
from ttcd_jax.run.directory import load_run
from ttcd_jax.sharding.mesh import MeshConfig, build_mesh

try:
    from ttcd_jax.measure import harness  # before lm_eval: it is offline from then on
except ImportError as error:
    sys.exit(f"error: {error}: install ttcd_jax[harness]")
import jax
import lm_eval.__main__
import lm_eval.api.registry

_AUTO = 16  # rows at once


class RunLM(harness.ScorerLM):
    """The model of a run directory at its newest checkpoint, or at `step`, by the arguments of
    `--model_args`; `param`: a change of the model, or a list of them, as in `load_run`;
    `batch_size` "auto" is our own choice, at most `max_batch_size`. `device` is the harness',
    without effect: JAX has chosen the devices."""

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        step: int | None = None,
        batch_size: int | str = _AUTO,
        param: str | Sequence[str] = (),
        device: str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        size = str(batch_size)
        if re.fullmatch("auto(:[0-9]+)?", size):
            size = str(_AUTO if max_batch_size is None else min(_AUTO, max_batch_size))
        if not (re.fullmatch("[0-9]+", size) and int(size)):
            most = "" if max_batch_size is None else f", at most {max_batch_size}"
            raise UserError(f"batch_size {batch_size!r}{most} is not a number of rows, or 'auto'")
        if device not in (None, "cuda:0"):  # which the harness passes where none is given
            found = jax.devices()[0].platform
            logging.warning("device %s has no effect: JAX computes on %s", device, found)
        changes = [*map(str, param if isinstance(param, list | tuple) else [param])]
        run = load_run(str(run_dir), step, changes)
        super().__init__(Scorer(run.model, run.tokenizer, batch_size=int(size), name="lm_eval"))

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> "RunLM":
        """The harness passes its own batch_size too: the one in `--model_args` counts. Raises
        `UserError` for an argument that a run does not have."""
        known = [*inspect.signature(cls).parameters]
        for name in arg_dict:
            if name not in known:
                takes = f"{closest(name, known)}: it takes {', '.join(known)}"
                raise UserError(f"--model_args: a run has no argument {name!r}{takes}")
        if "run_dir" not in arg_dict:
            raise UserError("--model_args: give run_dir=DIR")
        return cls(**(additional_config or {}) | arg_dict)


def main() -> None:
    cli.open_standard_streams()
    lm_eval.api.registry.model_registry.register("ttcd_jax", target=f"{__name__}:RunLM")
    lm_eval.evaluator.evaluate = harness.evaluate
    own = [x for x in sys.argv[1:] if x.startswith("--import=")]  # the others are the harness'
    sys.argv[:] = [x for x in sys.argv if x not in own]
    with cli.mistakes_reported():
        import_modules(x.removeprefix("--import=") for x in own)
        with jax.set_mesh(build_mesh(MeshConfig())), harness.Refusals("refuses"):
            lm_eval.__main__.cli_evaluate()


if __name__ == "__main__":
    main()
