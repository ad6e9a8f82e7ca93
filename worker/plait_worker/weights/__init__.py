"""Model files, read with limits; nothing in them is ever executed."""

from plait_worker.weights.errors import ModelFilesError

__all__ = ["ModelFilesError"]
