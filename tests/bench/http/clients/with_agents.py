"""openai-agents: an agent with a tool, over Responses and over chats."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import Any, Literal

from plait_testing.client_checks import MODEL, Checks, equal, report

agents: Any = import_module("agents")
noted: list[str] = []


def note(kind: Literal["create", "delete"]) -> str:
    """Note it."""
    noted.append(kind)
    return "copy kilo"


def agent(model: Any, **fields: Any) -> Any:
    client = import_module("openai").AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
    return agents.Agent(name="notes", model=model(model=MODEL, openai_client=client), **fields)


async def run(agent: Any) -> list[str]:
    """What it says, whole and streamed."""
    whole = await agents.Runner.run(agent, "copy kilo")
    streamed = agents.Runner.run_streamed(agent, "copy kilo")
    async for _ in streamed.stream_events():
        pass
    return [whole.final_output, streamed.final_output]


def text(model: Any) -> None:
    settings = agents.ModelSettings(temperature=0, max_tokens=8)
    equal(asyncio.run(run(agent(model, model_settings=settings))), ["kilo", "kilo"])


def tool(model: Any) -> None:
    """The agent calls it, and gives back what it says."""
    drawn = {"temperature": 100, "max_tokens": 600, "extra_body": {"seed": 1}}
    settings = agents.ModelSettings(tool_choice="note", parallel_tool_calls=False, **drawn)
    tools = {"tools": [agents.function_tool(note)], "tool_use_behavior": "stop_on_first_tool"}
    noted.clear()
    equal(asyncio.run(run(agent(model, model_settings=settings, **tools))), ["copy kilo", "copy kilo"])
    equal(len(noted), 2)


CHECKS: Checks = {
    "Responses": lambda: text(agents.OpenAIResponsesModel),
    "Responses, a tool": lambda: tool(agents.OpenAIResponsesModel),
    "chats": lambda: text(agents.OpenAIChatCompletionsModel),
    "chats, a tool": lambda: tool(agents.OpenAIChatCompletionsModel),
}

if __name__ == "__main__":
    agents.set_tracing_disabled(True)
    report(["openai-agents", "openai"], CHECKS)
