"""BABILong (Kuratov et al. 2024), qa1 to qa5: questions about facts hidden in a long text."""
