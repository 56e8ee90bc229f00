"""Text and synthetic tasks as packed rows, addressed by (seed, step) alone."""
