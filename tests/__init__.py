"""The suite; `python -m tests.NAME` runs a referee: parity, soak, machine_code."""
