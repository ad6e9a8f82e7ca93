"""Modules that a checkpoint keeps in 16 bits, as its configuration names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate

from plait_proto.fields import MAX_SHOWN, Fields

_EXPRESSIONS = ("re:", "-:")
"""Prefixes of regular expressions: compressed-tensors', and those of GPTQ's ``dynamic``."""


@dataclass(frozen=True, slots=True)
class IgnoredModules:
    """What the patterns of one checkpoint name."""

    names: frozenset[str] = frozenset()
    expressions: tuple[re.Pattern[str], ...] = ()
    """Matched from the beginning of a module's name."""
    is_exact: bool = False
    """Whether a name means one module; else also those below it, and it may be any part of the path."""

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.names or self.expressions)

    def __contains__(self, module: str) -> bool:
        """Whether the module keeps 16 bits."""
        if any(expression.match(module) for expression in self.expressions):
            return True
        return module in self.names if self.is_exact else not self.names.isdisjoint(_parts(module))


NOTHING_IGNORED = IgnoredModules()


def read_ignored(stated: Fields, patterns: Iterable[str], *, is_exact: bool) -> IgnoredModules:
    """Names; regular expressions after ``re:`` or ``-:``, as compressed-tensors and GPTQModel match; ModelOpt's stars.

    Raises ``stated.error`` for an expression that is none.
    """
    known = tuple(dict.fromkeys(patterns))
    expressions = [_compiled(stated, pattern) for pattern in known if pattern.startswith(_EXPRESSIONS)]
    others = [pattern for pattern in known if not pattern.startswith(_EXPRESSIONS)]
    if stars := [translate(pattern) for pattern in others if "*" in pattern]:
        expressions.append(re.compile("|".join(stars)))
    names = frozenset(pattern for pattern in others if "*" not in pattern)
    return IgnoredModules(names, tuple(expressions), is_exact)


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
