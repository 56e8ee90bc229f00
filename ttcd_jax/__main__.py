"""`python -m ttcd_jax` is `ttcd`."""

from ttcd_jax.commands.main import main

main()
