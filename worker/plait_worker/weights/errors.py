"""The one error of everything that reads model files."""

from __future__ import annotations


class ModelFilesError(ValueError):
    """A model's files are missing, broken or not supported; the message says which, why, and what to do."""
