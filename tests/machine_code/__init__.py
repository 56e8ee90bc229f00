"""What the kernels cost in machine code: `python -m tests.machine_code`."""
