"""What DeepSeek's own code makes of V4's chats; ``python tests/plait_testing/deepseek_v4_messages.py`` writes it.

The package ``deepseek-recipe`` (0.2.0) is needed for that alone: the tests of ``plait-text`` read the file.
"""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).resolve().parents[2] / "router" / "text" / "tests" / "fixtures" / "deepseek_v4_messages.json"
NUM_CHATS = 200
MAX_MESSAGES = 8
PLAIN_EFFORT = "low"
"""With more effort the recipe puts instructions of its own before the first message."""
TEXTS = (
    *("", " ", "\n", "a", "Hello, world", "  Be brief.  ", "a\n\nb\t<b>&\"'", "naïve 猫 🙂", "{{ x }} {% if %} {# #}"),
    *("<\uff5cUser\uff5c>", "</think>", "<think>hm</think>done", "\r\nline\r\n", "one. two.\n\nthree", "\\n", "0"),
)


def chats(seed: int = 0) -> Iterator[dict[str, Any]]:
    """Chats of all orders of roles; every second one begins as most do."""
    draw = random.Random(seed)
    for number in range(NUM_CHATS):
        roles = [draw.choice(("system", "user", "user", "assistant")) for _ in range(draw.randint(1, MAX_MESSAGES))]
        if number % 2:
            roles = ["system", *["user", "assistant"] * draw.randint(0, 3), "user"]
        messages = [{"role": role, "content": draw.choice(TEXTS)} for role in roles]
        yield {"messages": messages, "thinking": draw.random() < 0.5}


def rendered(chat: dict[str, Any]) -> str:
    """The recipe's prompt."""
    recipe: Any = importlib.import_module("deepseek_recipe")
    kinds = {"system": recipe.SystemMessage, "user": recipe.UserMessage, "assistant": recipe.AssistantMessage}
    messages = [kinds[message["role"]](message["content"]) for message in chat["messages"]]
    conversation = recipe.Conversation(messages, thinking_mode=chat["thinking"], reasoning_effort=PLAIN_EFFORT)
    prompt: str = recipe.DeepseekV4Encoding().render_conversation(conversation).prompt
    return prompt


if __name__ == "__main__":
    lines = [json.dumps(chat | {"expected": rendered(chat)}, ensure_ascii=False) for chat in chats()]
    GOLDEN.write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
