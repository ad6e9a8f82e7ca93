"""Requests as coding agents send them."""

from __future__ import annotations

from typing import Any


def _item(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def _text(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **fields}


_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_CACHED = {"cache_control": {"type": "ephemeral"}}
CODEX: dict[str, Any] = {
    "model": "tiny",
    "instructions": "You are a coding agent running in the Codex CLI.",
    "input": [
        _item("developer", "<permissions>"),
        _item("user", "<environment_context>"),
        _item("user", "run the tests"),
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "shell",
            "arguments": '{"command":["bash","-lc","make test"]}',
        },
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": '{"output":"ok","metadata":{"exit_code":0}}',
        },
    ],
    "tools": [
        {"type": "function", "name": "shell", "parameters": _NO_PARAMETERS, "strict": False},
        {"type": "function", "name": "update_plan", "description": "", "strict": False, "parameters": {}},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "019a",
    "client_metadata": {"x-codex-installation-id": "1"},
}
CLAUDE_CODE: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 32_000,
    "stream": True,
    "system": [_text("You are Claude Code.", **_CACHED), _text("# Tone", **_CACHED)],
    "messages": [
        {"role": "user", "content": [_text("<system-reminder>"), _text("fix it", **_CACHED)]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "a.py", **_CACHED},
                _text("<system-reminder>"),
            ],
        },
    ],
    "tools": [
        {"name": "Bash", "description": "Run.", "input_schema": {"type": "object"}, **_CACHED},
        {"name": "Edit", "description": "", "input_schema": _NO_PARAMETERS},
    ],
    "thinking": {"type": "enabled", "budget_tokens": 31_999},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": "user_1_account__session_2"},
    "temperature": 1,
}
