"""Tools of a chat: OpenAI's newer and older names for them as one, which tools may be called, and calls in messages."""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.http.bodies import ChatBody, FunctionName, Json, Message, ToolChoice
from plait.http.body_errors import field_error


class AskedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools may be called; mirrored by `ToolChoice` of `plait-openai`."""

    mode: Literal["none", "auto"] = "auto"
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
            tool_choice=_choice("function_call", body.function_call, body.functions),
            single_call=True,
            are_functions=True,
        )
    tools = body.tools or []
    return AskedTools(
        tools=tools,
        tool_choice=_choice("tool_choice", body.tool_choice, tools),
        single_call=body.parallel_tool_calls is False,
    )


def _choice(param: str, choice: str | ToolChoice | FunctionName | None, tools: list[dict[str, Json]]) -> AskedChoice:
    match choice:
        case None | "auto":
            return AskedChoice()
        case "none":
            return AskedChoice(mode="none")
        case "required" if not tools:
            raise field_error(param, 'is "required" without `tools`; send some, or leave it out')
        case ToolChoice(type="allowed_tools", allowed_tools=allowed) if allowed is not None:
            if allowed.mode != "auto":
                raise _forced(f"{param}.allowed_tools.mode", '"required"')
            return AskedChoice(names=[_name(param, tool.function) for tool in allowed.tools])
        case ToolChoice(type="function", function=function):
            raise _forced(param, f"the tool {_name(param, function)[:64]!r}")
        case FunctionName(name=name):
            raise _forced(param, f"the function {name[:64]!r}")
        case ToolChoice(type=kind):
            raise field_error(f"{param}.type", f"is {kind[:64]!r}, where 'function' and 'allowed_tools' are allowed")
    raise _forced(param, '"required"')


def _forced(param: str, given: str) -> Exception:
    problem = f'is {given}: this server cannot force a call yet; send "auto", and ask for the call in a message'
    return field_error(param, problem, code="unsupported_value")


def _name(param: str, function: FunctionName | None) -> str:
    if function is None:
        raise field_error(f"{param}.function", "is missing; send the name of a tool in it")
    return function.name


def calls_of(message: Message) -> list[dict[str, Json]] | None:
    """The message's calls; an older `function_call` is one of them."""
    if message.tool_calls is None and message.function_call is not None:
        return [{"type": "function", "function": message.function_call}]
    return message.tool_calls
