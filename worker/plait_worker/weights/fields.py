"""Typed, bounded reading of what a model's configuration states, for the worker."""

from __future__ import annotations

from plait_proto.fields import Fields as _Fields

from plait_worker.errors import ModelFilesError


class Fields(_Fields):
    """Those of a model's files: every reader raises ``ModelFilesError``."""

    error = ModelFilesError
