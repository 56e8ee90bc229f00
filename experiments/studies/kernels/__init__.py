"""The kernels on a GPU: are they right, how fast, with which tiles, and in a model's step. In a
checkout only; its modules are also those of `ttcd_kernels` (`python -m ttcd_kernels.check`)."""
