"""Launching an engine of a group: the checks, and a fingerprint that all engines of the group must share."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from plait.errors import SettingsError
from plait.model_files import LocalModel
from plait.settings import GroupMembership, ServeSettings

_TEXTS = ("config.json", "model.safetensors.index.json")
"""Files of a model folder that are compared by content. Others are compared by name and size."""


def with_fingerprint(place: GroupMembership, local: LocalModel, settings: ServeSettings) -> GroupMembership:
    """Adds the fingerprint of model and number formats. Raises `SettingsError` for settings that exclude groups."""
    if settings.scheduler.itl_target_ms is not None:
        raise SettingsError("--itl-target-ms times one engine's own steps, not a group's: leave it out of a group")
    if settings.process.step_trace is not None:
        raise SettingsError("--step-trace pairs an engine's own rows with the group's time: leave it out of a group")
    return msgspec.structs.replace(place, computes=_hash_compute_settings(local.path, settings))


def _hash_compute_settings(path: Path, settings: ServeSettings) -> str:
    alike = (
        settings.model.dtype,
        settings.model.load_format,
        settings.attention,
        settings.kv_cache,
        settings.device.device,
        (settings.process.tp, settings.process.dp, settings.process.dp_attention),
        sorted(_files(path)),
    )
    return hashlib.sha256(msgspec.json.encode(alike)).hexdigest()


def _files(path: Path) -> list[tuple[str, int, str]]:
    """Name, size and, for `_TEXTS`, digest of each file. A GGUF file counts under any name."""
    if path.is_file():
        return [("", path.stat().st_size, "")]
    files = [file for file in path.iterdir() if file.is_file() and file.suffix in (".json", ".safetensors")]
    return [(file.name, file.stat().st_size, _digest(file) if file.name in _TEXTS else "") for file in files]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
