"""A memory to look at: what each token wrote, who read it, and what it is worth."""

from ttcd_jax.inspection.inspection import Answer, Inspection, Reads, inspect
from ttcd_jax.inspection.reading import with_stream_memory

__all__ = ["Answer", "Inspection", "Reads", "inspect", "with_stream_memory"]
