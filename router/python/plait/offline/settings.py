"""Settings of an engine without HTTP: those of `plait serve`, under their names in Python."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Annotated, NamedTuple

import msgspec

from plait.check_settings import check_settings
from plait.errors import SettingsError
from plait.flags import Flag, flags
from plait.setting import Setting
from plait.settings import (
    AttentionSettings,
    DeviceSettings,
    KvCacheSettings,
    ModelName,
    ModelSettings,
    PageSettings,
    PoolingSettings,
    ProcessSettings,
    SchedulerSettings,
    ServeSettings,
    TemplateSettings,
)


class OfflineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What of `ServeSettings` an engine without HTTP reads."""

    model: ModelSettings = ModelSettings()
    pooling: PoolingSettings = PoolingSettings()
    template: TemplateSettings = TemplateSettings()
    device: DeviceSettings = DeviceSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    pages: PageSettings = PageSettings()
    attention: AttentionSettings = AttentionSettings()
    kv_cache: KvCacheSettings = KvCacheSettings()
    process: ProcessSettings = ProcessSettings()

    def served(self) -> ServeSettings:
        """The same for an engine, which gets the defaults of the rest. Raises `SettingsError` if they do not fit."""
        settings = ServeSettings(**{name: getattr(self, name) for name in OfflineSettings.__struct_fields__})
        check_settings(settings)
        return settings


class BatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Batch."""

    served_model_name: Annotated[
        tuple[ModelName, ...] | None,
        Setting("names that a body's `model` may have", unset="the folder's or file's name"),
    ] = None


class RunBatchSettings(OfflineSettings, frozen=True, kw_only=True):
    """Settings of `plait run-batch`."""

    batch: BatchSettings = BatchSettings()


class _Named(NamedTuple):
    component: str
    flag: Flag
    is_off: bool
    """The name says the contrary: `enforce_eager`."""


def read_keywords(given: Mapping[str, object]) -> ServeSettings:
    """The settings that are `given` by the flags' names with underscores, or their aliases'.

    Raises `SettingsError` that names the setting.
    """
    known = dict(_names(OfflineSettings))
    changes: dict[str, dict[str, object]] = {}
    for name, value in given.items():
        if name not in known:
            raise _unknown(name, known)
        component, flag, is_off = known[name]
        converted = _convert(name, flag, value)
        changes.setdefault(component, {})[flag.field] = not converted if is_off else converted
    return OfflineSettings(
        **{
            field.name: msgspec.structs.replace(field.default, **changes.get(field.name, {}))
            for field in msgspec.structs.fields(OfflineSettings)
        }
    ).served()


def _names(components: type[msgspec.Struct]) -> Iterator[tuple[str, _Named]]:
    for field in msgspec.structs.fields(components):
        for flag in flags(field.type, field.default):
            for name in (flag.name, *flag.setting.aliases):
                yield _keyword(name), _Named(field.name, flag, is_off=False)
            for name in flag.setting.off:
                yield _keyword(name), _Named(field.name, flag, is_off=True)


def _keyword(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _convert(name: str, flag: Flag, value: object) -> object:
    try:
        return msgspec.convert(value, type=flag.target)
    except msgspec.ValidationError:
        allowed = "True or False" if flag.scalar is bool else flag.allowed
        raise SettingsError(f"`{name}` is {value!r}; allowed: {allowed} ({flag.setting.meaning})") from None


def _unknown(name: str, known: Mapping[str, _Named]) -> SettingsError:
    if name in dict(_names(ServeSettings)):
        return SettingsError(f"`{name}` is for servers; leave it out, or start one with `plait serve`")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f"did you mean `{near[0]}`?" if near else "docs/settings.md lists them"
    return SettingsError(f"unknown setting `{name}`; {hint}")
