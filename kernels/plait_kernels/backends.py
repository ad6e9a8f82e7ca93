"""The dispatch table: which backend computes an operation on a device, for a dtype and a size.

A family declares an ``Op`` for each of its functions. The op asks its backends in order: one that does not take the
call gives its reason, and the next is asked. The last is the reference, which takes every call. Decisions are kept: a
later call of the same kind costs one look-up. A backend's module is imported when it is first chosen, so that Triton is
needed only where there is a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

TABLE: dict[str, dict[str, Op]] = {}
"""Every declared op, by family (its package's name) and name."""


class Call(NamedTuple):
    """What rules see of a call."""

    device: torch.device
    dtype: torch.dtype
    size: int
    """What the op's rules look at beside device and dtype; the op says what it is. 0 if they look at nothing else."""


Rule = Callable[[Call], str | None]
"""The reason why a backend does not take a call; None if it does."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One implementation of an op."""

    module: str
    """Within the family's package; it has a function of the op's name."""
    rules: tuple[Rule, ...] = ()

    def unsupported_reason(self, call: Call) -> str | None:
        """The first reason why it does not take the call; None if it does."""
        return next((reason for rule in self.rules if (reason := rule(call)) is not None), None)


def on_device(device_type: str) -> Rule:
    """Tensors on a kind of device ("cuda", "cpu")."""
    return lambda call: None if call.device.type == device_type else f"is for {device_type}, not {call.device.type}"


def of_dtype(*dtypes: torch.dtype) -> Rule:
    """Tensors of one of these dtypes."""
    return lambda call: None if call.dtype in dtypes else f"takes {', '.join(map(str, dtypes))}, not {call.dtype}"


def up_to(size: int, what: str) -> Rule:
    """Calls of at most this size."""
    return lambda call: None if call.size <= size else f"takes up to {size} {what}, not {call.size}"


def above(size: int, what: str) -> Rule:
    """Calls of more than this size."""
    return lambda call: None if call.size > size else f"takes more than {size} {what}, not {call.size}"


class Op:
    """One operation of a family, and its backends in the order in which they are asked."""

    def __init__(self, family: str, name: str, *backends: Backend) -> None:
        """The last of ``backends`` is the reference: it has no rules."""
        assert not backends[-1].rules, f"the reference of {family}.{name} has rules"
        self.family, self.name, self.backends = family, name, backends
        self._chosen: dict[tuple[torch.device, torch.dtype, int], Callable[..., Any]] = {}
        TABLE.setdefault(family, {})[name] = self

    def __call__(self, like: Tensor, size: int = 0) -> Callable[..., Any]:
        """The function for calls with tensors such as ``like``, and of this size."""
        call = (like.device, like.dtype, size)
        function = self._chosen.get(call)
        return self._choose(Call(*call)) if function is None else function

    def refusals(self, call: Call) -> Iterator[tuple[Backend, str]]:
        """The backends that are asked in vain, each with its reason."""
        for backend in self.backends:
            if (reason := backend.unsupported_reason(call)) is None:
                return
            yield backend, reason

    def backend(self, call: Call) -> Backend:
        """The first that takes the call."""
        return next(backend for backend in self.backends if backend.unsupported_reason(call) is None)

    def _choose(self, call: Call) -> Callable[..., Any]:
        module = importlib.import_module(f"{self.family}.{self.backend(call).module}")
        function: Callable[..., Any] = getattr(module, self.name)
        if len(self._chosen) < _MAX_DECISIONS:
            self._chosen[call] = function
        return function


_MAX_DECISIONS = 4096
"""Of one op: sizes may be counts of tokens."""
