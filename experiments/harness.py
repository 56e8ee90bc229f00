"""lm-evaluation-harness' own command, `lm_eval`, with runs as models.

    ttcd_lm_eval --model ttcd_jax --model_args run_dir=DIR,step=N,batch_size=16 --tasks hellaswag

`python -m experiments.harness` is the same. The harness looks for models in its own registry only,
so its command `lm_eval` has to be started here. All flags are the harness', and --import=MODULE: it
imports a module of the run.
"""

import sys

from experiments import cli
from ttcd_jax.registry import import_modules


def main() -> None:
    cli.open_standard_streams()
    try:
        from ttcd_jax.measure import harness  # before lm_eval: it is offline from then on
    except ImportError as error:
        sys.exit(f"error: {error}: install ttcd_jax[harness]")
    import jax
    import lm_eval.__main__
    import lm_eval.api.registry

    from ttcd_jax.sharding.mesh import MeshConfig, build_mesh

    target = "ttcd_jax.run.harness:RunLM"
    lm_eval.api.registry.model_registry.register("ttcd_jax", target=target)
    lm_eval.evaluator.evaluate = harness.evaluate
    own = [x for x in sys.argv[1:] if x.startswith("--import=")]  # the others are the harness'
    sys.argv[:] = [x for x in sys.argv if x not in own]
    with cli.mistakes_reported():
        import_modules(x.removeprefix("--import=") for x in own)
        with jax.set_mesh(build_mesh(MeshConfig())), harness.Refusals("refuses"):
            lm_eval.__main__.cli_evaluate()


if __name__ == "__main__":
    main()
