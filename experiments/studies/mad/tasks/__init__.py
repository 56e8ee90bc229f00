"""The six synthetic tasks of MAD (Poli et al. 2024, "Mechanistic Design and Scaling of Hybrid
Architectures"), bit-equal to the published generators.

Rows (`instances`) are a pure function of (config, seed, num_train, num_test): one stream serves the
training rows first, then the test rows. So test rows change with `num_train`, while a shorter
training split is a prefix of a longer one.

Recall tasks train on every next token, noise and padding included, and are tested on the values a
model can know. Compression, memorization and selective copying have the same kind of targets in
both splits, aligned with the inputs instead of shifted.
"""
