"""Meshes of devices, the sharding of arrays on them, and their collectives."""
