"""`--config FILE`: settings of a command as TOML, one `name = value` a line."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from plait.errors import SettingsError
from plait.flags import Flag, convert, flags, near_name

MAX_BYTES = 1 << 16
HELP = (
    'TOML file of settings, such as `max-seqs = 8` and `model = "FOLDER"`; aliases are names too, and what the '
    "command line gives goes first (default: none)"
)


class Entry(msgspec.Struct, frozen=True):
    """One `name = value` of the file."""

    place: str
    """File, line and column, from 1."""
    name: str
    """With hyphens, without the two in front."""
    value: Any


def add_config(parser: argparse.ArgumentParser) -> None:
    """Let a command that has a MODEL take `--config FILE`."""
    parser.add_argument("--config", metavar="FILE", help=HELP)


def apply_config(args: argparse.Namespace, components: type[msgspec.Struct]) -> None:
    """Add to the parsed arguments what `--config` gives and the command line does not.

    Raises `SettingsError` with line and column for what is not TOML, an unknown name, a name that is there twice, and a
    value that is not allowed.
    """
    if args.config is None:
        return
    names = _names(components)
    seen: dict[str, Entry] = {}
    given = vars(args)
    for entry in _entries(Path(args.config)):
        field, value = _setting(entry, names)
        if field in seen:
            raise SettingsError(f"{entry.place}: {entry.name} sets what {seen[field].place} sets too; keep one of them")
        seen[field] = entry
        if given.get(field) is None:
            given[field] = value


def _names(components: type[msgspec.Struct]) -> dict[str, tuple[Flag, bool]]:
    """Each name without hyphens in front: its flag, and whether it switches the flag off."""
    names: dict[str, tuple[Flag, bool]] = {}
    for component in msgspec.structs.fields(components):
        for flag in flags(component.type, component.default):
            spoken = [name[2:] for name in (flag.name, *flag.setting.aliases)]
            names |= {name: (flag, False) for name in spoken}
            if flag.scalar is bool:
                names |= {f"no-{name}": (flag, True) for name in spoken}
                names |= {name[2:]: (flag, True) for name in flag.setting.off}
    return names


def _setting(entry: Entry, names: dict[str, tuple[Flag, bool]]) -> tuple[str, object]:
    """The field and the value that go among the parsed arguments."""
    if entry.name == "model":
        return "model", _model(entry)
    if isinstance(entry.value, dict):
        raise SettingsError(f"{entry.place}: {entry.name!r} is a table; write each setting as `name = value`")
    if entry.name not in names:
        raise SettingsError(f"{entry.place}: unknown setting {entry.name!r}; {near_name(entry.name, list(names))}")
    flag, is_off = names[entry.name]
    if flag.scalar is bool and not isinstance(entry.value, bool):
        raise SettingsError(f"{entry.place}: {entry.name} is {entry.value!r}; allowed: true or false")
    value = not entry.value if is_off else entry.value
    value = [value] if flag.takes_several and not isinstance(value, list) else value
    try:
        convert(flag, value)
    except SettingsError as error:
        raise SettingsError(f"{entry.place}: {error.message}") from None
    return flag.field, value


def _model(entry: Entry) -> str:
    if not isinstance(entry.value, str):
        raise SettingsError(f"{entry.place}: model is {entry.value!r}; allowed: a text, as MODEL on the command line")
    return entry.value


def _entries(path: Path) -> Iterator[Entry]:
    """The settings of the file, in its order."""
    text = _read(path)
    first, statement = 0, ""
    for number, line in enumerate(text.splitlines(keepends=True)):
        first = first if statement else number
        statement += line
        try:
            parsed = tomllib.loads(statement)
        except tomllib.TOMLDecodeError:  # the value goes on in the next line: the whole file was parsed before
            continue
        column = len(statement) - len(statement.lstrip()) + 1
        place = f"{path}, line {first + 1}, column {column}"
        yield from (Entry(place, name.replace("_", "-"), value) for name, value in parsed.items())
        statement = ""


def _read(path: Path) -> str:
    """The file's text, which is TOML."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"--config: {path} cannot be read: {error.strerror}; name a TOML file") from None
    if len(raw) > MAX_BYTES:
        raise SettingsError(f"--config: {path} has more than {MAX_BYTES} bytes; settings take less, check the name")
    try:
        text = raw.decode()
        tomllib.loads(text)
    except UnicodeDecodeError:
        raise SettingsError(f"--config: {path} is not UTF-8; write it as TOML in UTF-8") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"--config: {path} is not TOML: {error}; write `name = value` in each line") from None
    return text
