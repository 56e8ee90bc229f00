"""Tasks whose rows are generated from (seed, index)."""
