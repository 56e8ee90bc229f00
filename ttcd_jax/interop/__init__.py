"""Other people's parameter names and configurations, as tables."""
