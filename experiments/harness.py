"""lm-evaluation-harness' own command, `lm_eval`, with runs as models.

    ttcd_lm_eval --model ttcd_jax --model_args run_dir=DIR,step=N,batch_size=16 --tasks hellaswag

`python -m experiments.harness` is the same. The harness looks for models in its own registry only,
so its command `lm_eval` has to be started here. All flags are the harness'.
"""

import sys
import traceback

from experiments import cli
from ttcd_jax.errors import UserError
from ttcd_jax.units import printable


def main() -> None:
    try:
        from lm_eval.__main__ import cli_evaluate
        from lm_eval.api.registry import model_registry
    except ImportError as error:
        sys.exit(f"error: {error}: install ttcd_jax[harness]")
    import jax

    from ttcd_jax.sharding.mesh import MeshConfig, build_mesh

    model_registry.register("ttcd_jax", target="ttcd_jax.run.harness:RunLM")
    try:
        cli.set_up_environment()
        with jax.set_mesh(build_mesh(MeshConfig())):
            cli_evaluate()
    except UserError as error:
        sys.exit(_told(error, error.exit_code))
    except (ValueError, LookupError, TypeError, OSError, AssertionError, RuntimeError) as error:
        cli.leave_if_unsupported(error)
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not frames[-1].f_globals["__name__"].startswith("lm_eval."):
            raise
        sys.exit(_told(error, UserError.exit_code))  # the harness' way to refuse


def _told(error: Exception, status: int) -> int:
    print(f"error: {printable(' '.join(str(error).split()))}", file=sys.stderr)
    return status


if __name__ == "__main__":
    main()
