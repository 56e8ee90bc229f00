"""Evaluation of a trained model, from its run directory."""
