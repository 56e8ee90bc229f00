"""Measuring a trained model. Needs a run directory, never the training loop."""
