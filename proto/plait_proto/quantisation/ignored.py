"""Modules that a checkpoint keeps in 16 bits, as its configuration names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import translate

from plait_proto.fields import MAX_SHOWN, Fields
from plait_proto.time_limit import TimeLimit

_EXPRESSIONS = ("re:", "-:")
"""Prefixes of regular expressions: compressed-tensors', and those of GPTQ's ``dynamic``."""
MATCHING_SECONDS = 10.0
"""For all names of a checkpoint together, which take milliseconds; an expression may backtrack for years."""


@dataclass(frozen=True, slots=True)
class _Expressions:
    """Regular expressions, and how long they may take."""

    compiled: tuple[re.Pattern[str], ...]
    limit: TimeLimit = field(compare=False)

    def match(self, module: str) -> bool:
        """Whether one matches from the beginning of a module's name."""
        with self.limit.held():
            return any(expression.match(module) for expression in self.compiled)


@dataclass(frozen=True, slots=True)
class IgnoredModules:
    """What the patterns of one checkpoint name."""

    names: frozenset[str] = frozenset()
    expressions: _Expressions | None = None
    is_exact: bool = False
    """Whether a name means one module; else also those below it, and it may be any part of the path."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.names) or self.expressions is not None

    def __contains__(self, module: str) -> bool:
        """Whether the module keeps 16 bits."""
        if self.expressions is not None and self.expressions.match(module):
            return True
        return module in self.names if self.is_exact else not self.names.isdisjoint(_parts(module))


NOTHING_IGNORED = IgnoredModules()


def read_ignored(stated: Fields, patterns: Iterable[str], *, is_exact: bool) -> IgnoredModules:
    """Names; regular expressions after ``re:`` or ``-:``, as compressed-tensors and GPTQModel match; ModelOpt's stars.

    Raises ``stated.error`` for an expression that is none; so does matching that takes too long.
    """
    known = tuple(dict.fromkeys(patterns))
    expressions = [_compiled(stated, pattern) for pattern in known if pattern.startswith(_EXPRESSIONS)]
    others = [pattern for pattern in known if not pattern.startswith(_EXPRESSIONS)]
    if stars := [translate(pattern) for pattern in others if "*" in pattern]:
        expressions.append(re.compile("|".join(stars)))
    names = frozenset(pattern for pattern in others if "*" not in pattern)
    limited = _Expressions(tuple(expressions), TimeLimit(MATCHING_SECONDS, _too_slow(stated))) if expressions else None
    return IgnoredModules(names, limited, is_exact)


def _too_slow(stated: Fields) -> Exception:
    return stated.error(
        f"{stated.where}: to match the regular expressions of modules that are not quantised takes more than "
        f"{MATCHING_SECONDS:g} s: correct them, or download the file again"
    )


def _compiled(stated: Fields, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern.split(":", 1)[1])
    except (re.error, OverflowError, RecursionError) as error:
        raise stated.error(
            f"{stated.where}: {pattern[:MAX_SHOWN]!r} should name modules that are not quantised, but is no regular "
            f"expression ({error}): correct it, or download the file again"
        ) from error


def _parts(module: str) -> Iterator[str]:
    """Every run of whole words of a path."""
    words = module.split(".")
    return (".".join(words[begin:end]) for begin in range(len(words)) for end in range(begin + 1, len(words) + 1))
