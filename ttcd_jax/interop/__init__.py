"""Checkpoints and configurations of the reference implementation."""
