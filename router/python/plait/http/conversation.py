"""Messages for the chat template, from APIs that keep thoughts, texts, calls and results apart."""

from __future__ import annotations

import msgspec

from plait.http.bodies import Json

Message = dict[str, Json]


class _Turn(msgspec.Struct):
    """A message that more may be added to; its texts are joined once, at the end."""

    role: str
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    call_id: str | None = None

    def message(self) -> Message:
        """As templates want it."""
        message: Message = {"role": self.role, "content": ("\n\n" if self.role == "system" else "\n").join(self.texts)}
        if self.call_id is not None:
            message["tool_call_id"] = self.call_id
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


class Conversation:
    """The messages so far. What the assistant says in a row is one message."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._open_calls: set[str] = set()
        """Ids of the calls of the last assistant message."""

    def messages(self) -> list[Message]:
        """All of them."""
        return [turn.message() for turn in self._turns]

    def instruct(self, text: str) -> None:
        """Instructions; those at the beginning are one message, as templates want it."""
        if len(self._turns) == 1 and self._turns[0].role == "system":
            self._turns[0].texts.append(text)
        else:
            self._add(_Turn("system", [text]))

    def ask(self, text: str) -> None:
        """What the user says."""
        self._add(_Turn("user", [text]))

    def think(self, text: str) -> None:
        """A thought of the assistant."""
        self._assistant().thoughts.append(text)

    def say(self, text: str) -> None:
        """What the assistant says."""
        self._assistant().texts.append(text)

    def call(self, call_id: str, name: str, arguments: Json) -> None:
        """A tool that the assistant calls, with arguments as a JSON text or object."""
        function = {"name": name, "arguments": arguments}
        self._assistant().calls.append({"id": call_id, "type": "function", "function": function})
        self._open_calls.add(call_id)

    def answers_call(self, call_id: str) -> bool:
        """Whether a result with this id may come now."""
        return call_id in self._open_calls

    def result(self, call_id: str, text: str) -> None:
        """What a call has given."""
        self._turns.append(_Turn("tool", [text], call_id=call_id))

    def _add(self, turn: _Turn) -> None:
        self._open_calls = set()
        self._turns.append(turn)

    def _assistant(self) -> _Turn:
        if not self._turns or self._turns[-1].role != "assistant":
            self._add(_Turn("assistant"))
        return self._turns[-1]
