"""Devices, which of them holds what, and what those that share a row tell each other."""
