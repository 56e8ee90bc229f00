"""A tiny run under faults drawn at random: `python -m tests.soak`."""
