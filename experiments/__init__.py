"""A checkout's commands, `experiments.launch` is `ttcd_jax.commands.launch`, and its studies."""

from pathlib import Path

from ttcd_jax import commands

__path__.extend([str(Path(__file__).parent / "studies"), *commands.__path__])
