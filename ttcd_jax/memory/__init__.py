"""Memories as objects: the protocol, its drivers (row, mesh, pieces), and the memories of methods."""
