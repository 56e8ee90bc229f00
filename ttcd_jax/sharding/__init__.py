"""Device meshes, the sharding of arrays, and collectives along sequences."""
