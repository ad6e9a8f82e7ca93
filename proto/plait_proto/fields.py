"""Typed, bounded reading of what a model's configuration states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

MAX_INTEGER = 1 << 32
MAX_SHOWN = 80
"""Characters of a wrong value that an error message shows."""


class Fields:
    """Named values of any type, read with type and range checks.

    Every reader raises ``error`` naming the field if the value is absent and has no default, has another type, or lies
    out of range. A null counts as absent.
    """

    error: ClassVar[type[Exception]] = ValueError
    """Takes a message; the worker and the command line have their own."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        """``where`` names the file in messages."""
        self.values = values
        self.where = where

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def integer(
        self, name: str, default: int | None = None, low: int = 1, high: int = MAX_INTEGER, other: str = ""
    ) -> int:
        """A whole number in ``low ..= high``; ``other`` is what else the caller takes, for the message."""
        value = self._value(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.value_error(name, f"a whole number from {low} to {high}{other and f', or {other}'}")
        return value

    def number(self, name: str, default: float | None = None, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number above ``low`` and at most ``high``."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not low < value <= high:
            raise self.value_error(name, f"a number above {low:g} and at most {high:g}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self.value_error(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A string."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self.value_error(name, "a string")
        return value

    def nested(self, name: str) -> Self:
        """The fields of an object; none if it is absent."""
        value = self._value(name, {})
        if not isinstance(value, dict):
            raise self.value_error(name, "an object")
        return type(self)(value, f"{self.where}, {name}")

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers, not negative; empty if it is absent."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < MAX_INTEGER for item in value):
            raise self.value_error(name, "a list of whole numbers")
        return value

    def texts(self, name: str) -> list[str]:
        """A list of strings; empty if it is absent."""
        value = self._value(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.value_error(name, "a list of strings")
        return value

    def _value(self, name: str, default: object) -> object:
        value = self.values.get(name)
        if value is None and default is None:
            reason = "the file is incomplete or of another kind of model; download it again"
            raise self.error(f"{self.where} lacks {name!r}: {reason}")
        return default if value is None else value

    def value_error(self, name: str, allowed: str) -> Exception:
        """The error for a value that cannot be."""
        shown = repr(self.values.get(name))[:MAX_SHOWN]
        advice = "correct it, or download the file again"
        return self.error(f"{self.where}: {name} is {shown}, but must be {allowed}: {advice}")
