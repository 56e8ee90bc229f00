"""RULER (Hsieh et al. 2024): the 13 tasks at any length, for any tokenizer."""
