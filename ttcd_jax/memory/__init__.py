"""The update rule of test-time context distillation as pure functions of arrays."""
