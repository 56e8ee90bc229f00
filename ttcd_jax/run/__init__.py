"""Training runs: configuration, objects, directory, assembly of the loop."""
