"""The configuration of a language model and the stacked transformer."""
