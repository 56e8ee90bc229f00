"""Two causal sliding windows over one set of queries, keys and values."""
