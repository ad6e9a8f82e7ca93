"""Tools of a chat: OpenAI's newer and older names for them as one, which tools may be called, and calls in messages."""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.http.bodies import ChatBody, FunctionName, Json, Message, ToolChoice
from plait.http.body_errors import field_error


class AskedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools may be called; mirrored by `ToolChoice` of `plait-openai`."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    names: list[str] | None = None
    """Only these; None: all."""


class AskedTools(msgspec.Struct, frozen=True, kw_only=True):
    """The tools of a chat, as the engine takes them."""

    tools: list[dict[str, Json]] = []
    tool_choice: AskedChoice = AskedChoice()
    single_call: bool = False
    """The answer ends after one call."""
    are_functions: bool = False
    """They came as `functions`, and calls leave as `function_call`."""


def read_tools(body: ChatBody) -> AskedTools:
    """The body's tools; raises `ApiError`."""
    if body.functions and body.tools:
        raise field_error("functions", "is given beside `tools`, its newer name; leave one out")
    if body.functions:
        return AskedTools(
            tools=[{"type": "function", "function": function} for function in body.functions],
            tool_choice=_choice("function_call", _of("tool_choice", "functions", body.tool_choice, body.function_call)),
            single_call=True,
            are_functions=True,
        )
    return AskedTools(
        tools=body.tools or [],
        tool_choice=_choice("tool_choice", _of("function_call", "tools", body.function_call, body.tool_choice)),
        single_call=body.parallel_tool_calls is False,
    )


_Choice = str | ToolChoice | FunctionName | None


def _of(other: str, tools: str, unread: _Choice, choice: _Choice) -> _Choice:
    """The choice that goes with `tools`; one under the `other` name must say nothing."""
    if unread not in (None, "auto", "none"):
        problem = f"asks for a call, and goes with other tools than `{tools}`; leave it out"
        raise field_error(other, problem)
    return choice


def _choice(param: str, choice: _Choice) -> AskedChoice:
    match choice:
        case None | "auto":
            return AskedChoice()
        case "none":
            return AskedChoice(mode="none")
        case ToolChoice(type="allowed_tools", allowed_tools=allowed) if allowed is not None:
            return AskedChoice(mode=allowed.mode, names=[_name(param, tool.function) for tool in allowed.tools])
        case ToolChoice(type="function", function=function):
            return AskedChoice(mode="named", names=[_name(param, function)])
        case FunctionName(name=name):
            return AskedChoice(mode="named", names=[name])
        case ToolChoice(type=kind):
            raise field_error(f"{param}.type", f"is {kind[:64]!r}, where 'function' and 'allowed_tools' are allowed")
    return AskedChoice(mode="required")


def _name(param: str, function: FunctionName | None) -> str:
    if function is None:
        raise field_error(f"{param}.function", "is missing; send the name of a tool in it")
    return function.name


def calls_of(message: Message) -> list[dict[str, Json]] | None:
    """The message's calls; an older `function_call` is one of them."""
    if message.tool_calls is None and message.function_call is not None:
        return [{"type": "function", "function": message.function_call}]
    return message.tool_calls
