"""Prompts of a given length: token ids, words or lines of a text, made of parts that prompts may share."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Protocol, TypeAlias

import msgspec

from plait.errors import SettingsError

# Short and frequent words: with the blank before it, each is one token in most tokenizers.
_COMMON = (
    "the of and to in that is was he for it with as his on be at by had not are but from or have an they which one "
    "you were her all she there would their we him been has when who will more no if out so said what up its about "
    "into than them can only other new some could time these two may then do first any my now such like our over man "
    "me even most made after also did many before must through back years where much your way well down should "
    "because each just those people how too little state good very make world still own see men work long get here "
    "between both life being under never day same another know while last might us great old year off come since"
)
_WORDS = _COMMON.split()


class Part(msgspec.Struct, frozen=True):
    """A part of a prompt: equal keys and lengths give equal text."""

    key: str
    num_tokens: int


class VerbatimPrompt(msgspec.Struct, frozen=True):
    """A prompt as the file has it."""

    json: bytes
    """Value of `prompt` or `messages`."""
    num_tokens: int | None
    """None unless it is given as token ids."""


Prompt: TypeAlias = tuple[Part, ...] | VerbatimPrompt


class TextSize(msgspec.Struct, frozen=True):
    """Tokens per piece of text, as measured from the server's usage."""

    tokens_per_piece: float = 1.0
    overhead: float = 0.0
    """Tokens of the chat template."""
    is_measured: bool = False
    """False: the server sends no usage, so a piece counts as one token."""

    def pieces(self, num_tokens: float) -> int:
        """Pieces of text for a number of tokens."""
        return max(1, round(num_tokens / self.tokens_per_piece))


class PromptMaker(Protocol):
    """Turns parts into the JSON value of a request's `prompt` or `messages`."""

    def make(self, parts: tuple[Part, ...]) -> bytes: ...


class TokenIds:
    """Random token ids from `low` to below `high`: lengths are exact."""

    def __init__(self, low: int, high: int) -> None:
        self._ids = [b"%d" % token for token in range(low, high)]
        self._part = lru_cache(maxsize=4096)(self._sample)

    def make(self, parts: tuple[Part, ...]) -> bytes:
        """A list of ids."""
        # The last part is the prompt's own: caching it would not pay.
        shared = [self._part(part) for part in parts[:-1]]
        return b"[" + b",".join((*shared, self._sample(parts[-1]))) + b"]"

    def _sample(self, part: Part) -> bytes:
        return b",".join(random.Random(part.key).choices(self._ids, k=part.num_tokens))


class Words:
    """Random words, as a text or as one message of a chat: lengths are as exact as `size`."""

    def __init__(self, chat: bool, size: TextSize) -> None:
        self._chat = chat
        self._size = size

    def make(self, parts: tuple[Part, ...]) -> bytes:
        """A text, or a chat with one message."""
        return text_prompt(self._chat, " ".join(self._sample(part) for part in _less_overhead(parts, self._size)))

    def _sample(self, part: Part) -> str:
        return " ".join(random.Random(part.key).choices(_WORDS, k=self._size.pieces(part.num_tokens)))


class Lines:
    """Random lines of a text; a piece is a character."""

    def __init__(self, chat: bool, size: TextSize, lines: list[str]) -> None:
        self._chat = chat
        self._size = size
        self._lines = lines

    def make(self, parts: tuple[Part, ...]) -> bytes:
        """A text, or a chat with one message."""
        return text_prompt(self._chat, "\n".join(self._sample(part) for part in _less_overhead(parts, self._size)))

    def _sample(self, part: Part) -> str:
        rng, num_chars, text = random.Random(part.key), self._size.pieces(part.num_tokens), ""
        while len(text) < num_chars:
            text += rng.choice(self._lines) + "\n"
        return text[:num_chars]


def _less_overhead(parts: tuple[Part, ...], size: TextSize) -> tuple[Part, ...]:
    """The parts, the prompt's own one shortened by what the chat template adds."""
    own = max(1, parts[-1].num_tokens - round(size.overhead))
    return (*parts[:-1], Part(parts[-1].key, own))


def text_prompt(chat: bool, text: str) -> bytes:
    """The JSON value of `messages` or `prompt` for a text."""
    return msgspec.json.encode([{"role": "user", "content": text}] if chat else text)


MAX_TOKEN_ID = 1 << 24


def read_token_range(words: str) -> tuple[int, int]:
    """Parse `LOW-HIGH`, where HIGH is exclusive; raises `SettingsError`."""
    low, _, high = words.partition("-")
    is_short = len(words) <= 2 * len(str(MAX_TOKEN_ID)) + 1  # Python refuses to read thousands of digits
    if not (is_short and low.isdecimal() and high.isdecimal() and int(low) < int(high) <= MAX_TOKEN_ID):
        raise SettingsError(
            f"--token-range is {words[:80]!r}; allowed: LOW-HIGH with LOW under HIGH and HIGH up to {MAX_TOKEN_ID}, "
            "inside the model's vocabulary and without its special tokens"
        )
    return int(low), int(high)
