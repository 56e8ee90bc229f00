"""RULER (Hsieh et al. 2024): the 13 tasks at any length, for any tokenizer."""

from ttcd_jax.tasks.ruler.task import NIAH, TASKS, make_samples

__all__ = ["NIAH", "TASKS", "make_samples"]
