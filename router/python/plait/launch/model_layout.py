"""Whether the ranks divide the model, where its `config.json` is on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path

from plait_proto.divided_model import check_layout

from plait.errors import SettingsError, StartError
from plait.plan.model import PlannedModel, read_model
from plait.settings import ProcessSettings


def check_model_layout(model: str | None, process: ProcessSettings) -> None:
    """Raise `SettingsError` as the ranks do at a start.

    Nothing is known of a GGUF file, of a model that is not on this machine, and of one that `plait plan` does not read.
    """
    planned = _planned(model)
    if planned is None:
        return
    try:
        check_layout(planned.divided, process.tp, process.dp, dp_attention=process.dp_attention)
    except ValueError as error:
        raise SettingsError(str(error)) from error


def _planned(model: str | None) -> PlannedModel | None:
    folder = Path(model or "").expanduser()
    if model is None or not folder.is_dir():
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="plait-") as scratch:
            return read_model(str(folder), Path(scratch))
    except StartError:
        return None
