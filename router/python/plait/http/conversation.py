"""Messages for the chat template, from APIs that keep thoughts, texts, calls and results apart."""

from __future__ import annotations

from plait.http.bodies import Json

Message = dict[str, Json]


class Conversation:
    """The messages so far. What the assistant says in a row is one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._open_calls: set[str] = set()
        """Ids of the calls of the last assistant message."""

    def instruct(self, text: str) -> None:
        """Instructions; those at the beginning are one message, as templates want it."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] = f"{self.messages[0]['content']}\n\n{text}"
        else:
            self._add({"role": "system", "content": text})

    def ask(self, text: str) -> None:
        """What the user says."""
        self._add({"role": "user", "content": text})

    def think(self, text: str) -> None:
        """A thought of the assistant."""
        message = self._assistant()
        before = message.get("reasoning_content")
        message["reasoning_content"] = f"{before}\n{text}" if before else text

    def say(self, text: str) -> None:
        """What the assistant says."""
        message = self._assistant()
        message["content"] = f"{message['content']}\n{text}" if message["content"] else text

    def call(self, call_id: str, name: str, arguments: Json) -> None:
        """A tool that the assistant calls, with arguments as a JSON text or object."""
        message = self._assistant()
        function = {"name": name, "arguments": arguments}
        calls = message.setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append({"id": call_id, "type": "function", "function": function})
        self._open_calls.add(call_id)

    def answers_call(self, call_id: str) -> bool:
        """Whether a result with this id may come now."""
        return call_id in self._open_calls

    def result(self, call_id: str, text: str) -> None:
        """What a call has given."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _add(self, message: Message) -> None:
        self._open_calls = set()
        self.messages.append(message)

    def _assistant(self) -> Message:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add({"role": "assistant", "content": ""})
        return self.messages[-1]
