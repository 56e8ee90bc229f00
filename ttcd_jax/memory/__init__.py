"""Memories as objects: the protocol, its drivers (row, mesh, pieces), the memories of methods."""
