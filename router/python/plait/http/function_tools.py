"""Tools of APIs that declare them flat, as chat declares them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from plait.http.bodies import Json
from plait.http.body_errors import UNSUPPORTED, field_error
from plait.http.validate import free_form


class FunctionTool(Protocol):
    """A tool that the client runs, as an API declares it."""

    @property
    def type(self) -> str | None: ...
    @property
    def name(self) -> str | None: ...
    @property
    def description(self) -> str | None: ...
    @property
    def parameters(self) -> dict[str, Json] | None: ...
    @property
    def strict(self) -> bool | None: ...


def function_tools(tools: Sequence[FunctionTool], types: Sequence[str | None], advice: str) -> list[dict[str, Json]]:
    """Tools as chat declares them; raises `ApiError` for one of another type, with what to send instead."""
    for index, tool in enumerate(tools):
        if tool.type not in types:
            problem = f"is {str(tool.type)[:64]!r}: this server has no tools of its own; {advice}"
            raise field_error(f"tools[{index}].type", problem, UNSUPPORTED)
    return free_form("tools", [{"type": "function", "function": _function(tool)} for tool in tools])


def _function(tool: FunctionTool) -> dict[str, Json]:
    asked: dict[str, Json] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {name: value for name, value in asked.items() if value is not None}
