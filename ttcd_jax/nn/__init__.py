"""Layers as flax.nnx modules, `(config, *, rngs)`: math on arrays, no mesh, no loop over layers."""
