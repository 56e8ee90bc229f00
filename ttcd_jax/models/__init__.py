"""Blocks, the stacked transformer, and the list of methods."""
