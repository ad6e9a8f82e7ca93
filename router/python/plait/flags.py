"""Command-line flags generated from settings structs: names, help, and parsing into the structs."""

from __future__ import annotations

import argparse
import difflib
import re
import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import Meta

from plait.errors import SettingsError
from plait.flags_of_others import STAND_INS
from plait.setting import Setting

S = TypeVar("S", bound=msgspec.Struct)


class Flag(msgspec.Struct, frozen=True):
    """One setting on the command line."""

    field: str
    target: object
    """Type with range and None, as msgspec converts to it."""
    choices: tuple[str, ...]
    """Allowed values of a Literal; empty for other types."""
    scalar: type
    """Type of its values."""
    takes_several: bool
    """A list of values may be given."""
    bounds: Meta
    default: object
    setting: Setting

    @property
    def name(self) -> str:
        """`--max-seqs` for `max_seqs`."""
        return "--" + self.field.replace("_", "-")

    @property
    def help(self) -> str:
        """The meaning and the default, escaped for argparse."""
        if self.scalar is bool:
            default = self.name if self.default else f"--no-{self.name[2:]}"
        else:
            default = self.setting.unset if self.default is None else str(self.default)
        return f"{self.setting.meaning} (default: {default})".replace("%", "%%")

    @property
    def allowed(self) -> str:
        """The allowed values as text."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.scalar is bool:
            return "on or off"
        if self.scalar is str:
            least, most = self.bounds.min_length, self.bounds.max_length
            text = "text" if most is None else f"text of {least} to {most} characters"
            return f"{text}, or several" if self.takes_several else text
        noun = "a whole number" if self.scalar is int else "a number"
        if self.bounds.gt is not None:
            return f"{noun} over {self.bounds.gt:g} and up to {self.bounds.le:g}"
        return f"{noun} from {self.bounds.ge} to {self.bounds.le}"

    @property
    def metavar(self) -> str:
        """The value's placeholder in the help."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return {int: "N", float: "X"}.get(self.scalar, self.field.upper())


class Parser(argparse.ArgumentParser):
    """argparse that raises `SettingsError` instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        """Raise argparse's message as `SettingsError`."""
        raise SettingsError(f"{message}; see `{self.prog} --help`")


def flags(component: type[msgspec.Struct], defaults: msgspec.Struct | None = None) -> Iterator[Flag]:
    """The flags of one component, in the order of its fields. `defaults` overrides the class's defaults."""
    for field in msgspec.structs.fields(component):
        (setting,) = (part for part in get_args(field.type) if isinstance(part, Setting))
        bare, bounds = _unwrap(field.type)
        takes_several = get_origin(bare) is tuple
        if takes_several:
            bare, bounds = _unwrap(get_args(bare)[0])
        choices = get_args(bare) if get_origin(bare) is Literal else ()
        scalar = str if choices else bare
        default = field.default if defaults is None else getattr(defaults, field.name)
        yield Flag(field.name, field.type, choices, scalar, takes_several, bounds, default, setting)


def _unwrap(annotated: Any) -> tuple[Any, Meta]:
    """The class or Literal inside annotations and `| None`, and its bounds."""
    bounds = Meta()
    while get_origin(annotated) in (Annotated, Union, types.UnionType):
        bounds = next((part for part in get_args(annotated) if isinstance(part, Meta)), bounds)
        annotated = get_args(annotated)[0]
    return annotated, bounds


def add_flags(parser: argparse.ArgumentParser, components: type[msgspec.Struct]) -> None:
    """Add a group of flags for each component of the settings struct `components`."""
    for field in msgspec.structs.fields(components):
        group = parser.add_argument_group((field.type.__doc__ or field.name).rstrip("."))
        for flag in flags(field.type, field.default):
            _add(group, flag)


def _add(group: argparse._ArgumentGroup, flag: Flag) -> None:
    names = (flag.name, *flag.setting.aliases)
    if flag.scalar is bool:
        group.add_argument(
            *names, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, dest=flag.field, help=flag.help
        )
        if flag.setting.off:
            group.add_argument(
                *flag.setting.off,
                action="store_false",
                default=argparse.SUPPRESS,
                dest=flag.field,
                help=f"as --no-{flag.name[2:]}",
            )
    else:
        group.add_argument(
            *names,
            default=argparse.SUPPRESS,
            dest=flag.field,
            help=flag.help,
            metavar=flag.metavar,
            nargs="+" if flag.takes_several else None,
        )


def read_settings(args: argparse.Namespace, components: type[S]) -> S:
    """The settings from parsed arguments; raises `SettingsError` that names the invalid flag."""
    given = vars(args)
    values = {field.name: _read_component(given, field.default) for field in msgspec.structs.fields(components)}
    return components(**values)


def _read_component(given: dict[str, object], defaults: S) -> S:
    named = [flag for flag in flags(type(defaults)) if flag.field in given]
    return msgspec.structs.replace(defaults, **{flag.field: convert(flag, given[flag.field]) for flag in named})


def convert(flag: Flag, raw: object) -> object:
    """A value as its setting has it; raises `SettingsError` with what is allowed."""
    try:
        return msgspec.convert(raw, type=flag.target, strict=False)
    except msgspec.ValidationError:
        given = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
        message = f"{flag.name} is {given!r}; allowed: {flag.allowed} ({flag.setting.meaning})"
        raise SettingsError(message) from None


def reject_unknown(parser: argparse.ArgumentParser, unknown: list[str]) -> None:
    """Raise `SettingsError` for unknown arguments: what stands in for another server's flag, or the nearest of ours."""
    if not unknown:
        return
    word = unknown[0].split("=")[0]
    help_text = re.sub(r"-\n\s*", "-", parser.format_help())  # argparse wraps lines at hyphens too
    known = sorted(set(re.findall(r"--[a-z][a-z-]*", help_text)))
    hint = STAND_INS.get(word.replace("_", "-")) or near_name(word, known, f"see `{parser.prog} --help`")
    what = "setting" if word.startswith("-") else "argument"
    raise SettingsError(f"unknown {what} {word!r}; {hint}")


def near_name(word: str, known: list[str], otherwise: str = "docs/settings.md has all names") -> str:
    """A question after the name of `known` that is nearest to `word`, or `otherwise`."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else otherwise


def name_as_typed(message: str, components: type[msgspec.Struct], words: list[str]) -> str:
    """The message about a setting of `components`, with the alias among `words` beside its main name."""
    given = {word.split("=")[0] for word in words}
    for component in msgspec.structs.fields(components):
        for flag in flags(component.type, component.default):
            for alias in given.intersection(flag.setting.aliases):
                message = re.sub(rf"{flag.name}(?![\w-])", f"{flag.name} ({alias})", message, count=1)
    return message
