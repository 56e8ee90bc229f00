"""Rows read piece by piece and continued token by token, with the memory on."""
