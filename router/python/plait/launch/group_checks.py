"""Launching an engine of a group: the checks, and the facts that all engines of the group must share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from plait.errors import SettingsError
from plait.model_files import LocalModel
from plait.settings import GroupMembership, ServeSettings

_TEXTS = ("config.json", "model.safetensors.index.json")
"""Files of a model folder that are compared by content. Others are compared by name and size."""
_SHOWN_DIGITS = 32
"""Of a SHA-256 in hexadecimal."""


def with_facts(place: GroupMembership, local: LocalModel, settings: ServeSettings) -> GroupMembership:
    """Adds the facts about model, formats and layout. Raises `SettingsError` for settings that exclude groups."""
    check_group_settings(settings)
    return msgspec.structs.replace(place, facts=dict(_facts(local.path, settings)))


def check_group_settings(settings: ServeSettings) -> None:
    """Raise `SettingsError` for what only an engine of its own has."""
    if settings.scheduler.itl_target_ms is not None:
        raise SettingsError("--itl-target-ms times one engine's own steps, not a group's: leave it out of a group")
    if settings.process.step_trace is not None:
        raise SettingsError("--step-trace pairs an engine's own rows with the group's time: leave it out of a group")


def _facts(path: Path, settings: ServeSettings) -> Iterator[tuple[str, str]]:
    alike = {
        "dtype": settings.model.dtype,
        "quantization": settings.model.quantization,
        "load_format": settings.model.load_format,
        "dp_attention": settings.process.dp_attention,
        **msgspec.structs.asdict(settings.device),
        **msgspec.structs.asdict(settings.attention),
        **msgspec.structs.asdict(settings.kv_cache),
    }
    for name, value in alike.items():
        yield f"--{name.replace('_', '-')}", str(value)
    yield from _describe_files(path)


def _describe_files(path: Path) -> Iterator[tuple[str, str]]:
    """Digest or size of each file. A GGUF file counts under any name."""
    if path.is_file():
        yield "GGUF file", f"{path.stat().st_size} bytes"
        return
    weights = hashlib.sha256()
    num_bytes = 0
    for file in sorted(path.iterdir()):
        if file.is_file() and file.name in _TEXTS:
            yield file.name, _digest(file)
        elif file.is_file() and file.suffix in (".json", ".safetensors"):
            num_bytes += file.stat().st_size
            weights.update(f"{file.name} {file.stat().st_size}\n".encode())
    yield "files of the model", f"{num_bytes} bytes ({weights.hexdigest()[:_SHOWN_DIGITS]})"


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:_SHOWN_DIGITS]
