"""`llm` of PyPI, with Plait in its extra-openai-models.yaml."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

from plait_testing.client_checks import ASK, DRAWN, FUNCTION, MODEL, SCHEMA, Checks, check_kind, equal, report

MODELS = """
- model_id: plait
  model_name: {model}
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
- model_id: plait-completion
  model_name: {model}
  api_base: {url}/v1
  completion: true
"""

GREEDY = ("-o", "temperature", "0")


def command(*words: str) -> str:
    """What `llm` of the command line prints."""
    program = Path(sys.executable).with_name("llm")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    equal((done.returncode, done.stderr), (0, ""))
    return done.stdout.strip()


class Forced:
    """Plait as a model of `llm`, which itself lets no caller choose a tool or a temperature over 2."""

    def __init__(self, **fields: Any) -> None:
        self.model = import_module("llm").get_model("plait")
        usual = self.model.build_kwargs
        self.model.build_kwargs = lambda *given, **named: usual(*given, **named) | fields


def plain() -> Any:
    """The SDK alone, whose answers are the right ones."""
    return import_module("openai").OpenAI(base_url=f"{sys.argv[1]}/v1")


def conversation() -> None:
    said = [{"role": "assistant", "content": command("-m", "plait", *GREEDY, "copy kilo")}]
    messages = [*ASK, *said, {"role": "user", "content": "copy lima"}]
    right = plain().chat.completions.create(model=MODEL, messages=messages, temperature=0).choices[0].message.content
    equal(command("-c", *GREEDY, "copy lima"), right.strip())


def completions() -> None:
    right = plain().completions.create(model=MODEL, prompt="copy kilo", max_tokens=5, temperature=0).choices[0].text
    equal(command("-m", "plait-completion", *GREEDY, "-o", "max_tokens", "5", "copy kilo"), right.strip())


def structured() -> None:
    model = Forced(**DRAWN, max_tokens=600).model
    check_kind(model.prompt("copy kilo", schema=SCHEMA, stream=False).text())
    check_kind("".join(model.prompt("copy kilo", schema=SCHEMA, stream=True)))


def tool(stream: bool) -> None:
    """A call, its result, and what the model says of it."""
    noted: list[str] = []

    def note(kind: str) -> str:
        noted.append(kind)
        return "done"

    tools = [import_module("llm").Tool(**_renamed(FUNCTION), implementation=note)]
    forced = {"tool_choice": {"type": "function", "function": {"name": "note"}}, "parallel_tool_calls": False}
    first = Forced(**DRAWN, max_tokens=600, **forced).model.prompt("copy kilo", tools=tools, stream=stream)
    results = first.execute_tool_calls()
    equal((len(noted), [result.output for result in results]), (1, ["done"]))
    again = Forced(temperature=0, max_tokens=8).model
    conversation = again.conversation()
    conversation.responses.append(first)
    equal(bool(conversation.prompt("copy kilo", tools=tools, tool_results=results, stream=stream).text()), True)


def _renamed(function: dict[str, Any]) -> dict[str, Any]:
    return {"input_schema" if name == "parameters" else name: value for name, value in function.items()}


CHECKS: Checks = {
    "chat, streamed": lambda: equal(command("-m", "plait", *GREEDY, "copy kilo"), "kilo"),
    "chat, whole": lambda: equal(command("-m", "plait", "--no-stream", *GREEDY, "copy kilo"), "kilo"),
    "a conversation": conversation,
    "completions": completions,
    "a schema": structured,
    "a tool, streamed": lambda: tool(stream=True),
    "a tool, whole": lambda: tool(stream=False),
}


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "extra-openai-models.yaml").write_text(MODELS.format(model=MODEL, url=url))
        os.environ |= {"LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        report(["llm", "openai"], CHECKS)


if __name__ == "__main__":
    main(sys.argv[1])
