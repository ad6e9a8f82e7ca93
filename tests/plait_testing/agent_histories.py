"""Long histories as coding agents send them, and the plain chats that say the same.

A round is a thought, two calls side by side and their results; sometimes one fails, and sometimes the agent says
something first.
"""

from __future__ import annotations

import json
from typing import Any

from plait_testing.agent_requests import CLAUDE_CODE, CODEX

Items = list[dict[str, Any]]
SYSTEM = ("You are an agent.", "Be brief.")
DEVELOPER = "<permissions>"
ASK = "copy kilo"


def thought(number: int) -> str:
    return f"t{number}"


def said(number: int) -> str:
    """What the agent says before it calls; mostly nothing."""
    return f"Step {number}." if number % 5 == 0 else ""


def calls(number: int) -> list[tuple[str, str, dict[str, Any]]]:
    """Ids, names and arguments."""
    return [(f"c{number}a", "Bash", {"command": f"ls {number}"}), (f"c{number}b", "Edit", {})]


def results(number: int) -> list[tuple[str, str, bool]]:
    """Ids, texts and whether it failed; the second call is often done first."""
    both = [(f"c{number}a", f"f{number}", number % 7 == 0), (f"c{number}b", "ok\n", False)]
    return both[::-1] if number % 3 == 0 else both


def codex(num_rounds: int) -> dict[str, Any]:
    """As Codex asks `/v1/responses`: nothing is stored, and thoughts come back as it got them."""
    items = [_item("developer", DEVELOPER), _item("user", "<environment_context>")]
    for number in range(num_rounds):
        items += _codex_round(number)
    return CODEX | {"instructions": "\n".join(SYSTEM), "input": [*items, _item("user", ASK)], "tools": CODEX_TOOLS}


def _codex_round(number: int) -> Items:
    content = [{"type": "reasoning_text", "text": thought(number)}]
    reasoning = {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": content}
    items: Items = [reasoning | {"encrypted_content": ""}]
    if said(number):
        text = {"type": "output_text", "text": said(number), "annotations": []}
        items.append({"type": "message", "role": "assistant", "id": f"msg_{number}", "content": [text]})
    for call_id, name, arguments in calls(number):
        called = {"type": "function_call", "id": f"fc_{call_id}", "status": "completed", "name": name}
        items.append(called | {"call_id": call_id, "arguments": json.dumps(arguments)})
    for call_id, told, is_error in results(number):
        output: Any = [{"type": "input_text", "text": _failed(told, is_error)}] if is_error else told
        items.append({"type": "function_call_output", "call_id": call_id, "output": output})
    return items


def claude_code(num_rounds: int) -> dict[str, Any]:
    """As Claude Code asks `/v1/messages?beta=true`: marks of caches at both ends, reminders behind results."""
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: Items = [{"role": "user", "content": [_block("<environment_context>")]}]
    for number in range(num_rounds):
        messages += _claude_round(number)
    last = messages.pop()
    messages.append(last | {"content": [*last["content"], _block(ASK, **cached)]})
    system = [_block(text, **cached) for text in (*SYSTEM, DEVELOPER)]
    return CLAUDE_CODE | {"system": system, "messages": messages, "tools": CLAUDE_TOOLS}


def _claude_round(number: int) -> Items:
    blocks: Items = [{"type": "thinking", "thinking": thought(number), "signature": "c2ln"}]
    if said(number):
        blocks.append(_block(said(number)))
    blocks += [
        {"type": "tool_use", "id": call_id, "name": name, "input": given} for call_id, name, given in calls(number)
    ]
    answers: Items = [
        {"type": "tool_result", "tool_use_id": call_id, "content": [_block(told)], "is_error": is_error}
        for call_id, told, is_error in results(number)
    ]
    return [{"role": "assistant", "content": blocks}, {"role": "user", "content": answers}]


def plain_chat(num_rounds: int, instructions: str) -> Items:
    """The messages of a chat with the same history."""
    messages: Items = [
        {"role": "system", "content": instructions},
        {"role": "user", "content": "<environment_context>"},
    ]
    for number in range(num_rounds):
        functions = [(call_id, {"name": name, "arguments": given}) for call_id, name, given in calls(number)]
        made = [{"id": call_id, "type": "function", "function": function} for call_id, function in functions]
        spoken = {"role": "assistant", "content": said(number), "reasoning_content": thought(number)}
        messages.append(spoken | {"tool_calls": made})
        messages += [
            {"role": "tool", "tool_call_id": call_id, "content": _failed(told, is_error)}
            for call_id, told, is_error in results(number)
        ]
    return [*messages, {"role": "user", "content": ASK}]


PARAMETERS: dict[str, Any] = {"type": "object", "properties": {"command": {"type": "string"}}}
FUNCTIONS: Items = [
    {"name": "Bash", "description": "Run.", "parameters": PARAMETERS},
    {"name": "Edit", "parameters": {}},
]
CHAT_TOOLS: Items = [{"type": "function", "function": function} for function in FUNCTIONS]
CODEX_TOOLS: Items = [{"type": "function", **function} for function in FUNCTIONS]
CLAUDE_TOOLS: Items = [
    {"input_schema" if name == "parameters" else name: value for name, value in function.items()}
    | {"cache_control": {"type": "ephemeral"}}
    for function in FUNCTIONS
]


def _failed(text: str, is_error: bool) -> str:
    return f"Error: {text}" if is_error else text


def _item(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def _block(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}
