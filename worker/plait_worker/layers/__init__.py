"""Layers of the model families, sharded among the ranks."""
