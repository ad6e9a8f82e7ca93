"""Limits of the bodies' fields that their types do not state, as the description has them.

The values are the engine's (`engine_limits`). A limit in bytes is given in characters: a text of more characters has
more bytes.
"""

from __future__ import annotations

import math
from typing import Any

from plait.http import engine_limits as limits
from plait.http.engine_limits import Range
from plait.http.responses import MAX_ITEMS

Schema = dict[str, Any]
Bounds = dict[str, Range]
"""By JSON type: an entry's, too, where a list or an object has entries of that type."""

_NAMES = {
    "integer": ("minimum", "maximum"),
    "number": ("minimum", "maximum"),
    "array": ("minItems", "maxItems"),
    "string": ("minLength", "maxLength"),
    "object": ("minProperties", "maxProperties"),
}
_TOKEN_ID = Range(0, math.inf)


def _ids(number: Range) -> Bounds:
    return {"array": number, "integer": _TOKEN_ID}


_REGEX: Bounds = {"string": limits.REGEX_BYTES}
_CHOICE: Bounds = {"array": limits.NUM_CHOICES, "string": limits.CHOICE_BYTES}
_GRAMMAR: Bounds = {"string": limits.GRAMMAR_BYTES}
_SPACES: Bounds = {"string": limits.SPACES_BYTES}
_STOP: Bounds = {"array": limits.STOP_STRINGS, "string": limits.STOP_BYTES}

OF_PROMPTS: dict[str, Bounds] = {
    "ChatBody.messages": {"array": limits.MESSAGES},
    "chat_template_kwargs": {"object": limits.TEMPLATE_ARGUMENTS},
    "documents": {"array": limits.DOCUMENTS},
    "tools": {"array": limits.TOOLS},
    "functions": {"array": limits.TOOLS},
    "ResponsesBody.input": {"array": Range(0, MAX_ITEMS)},
    "tokens": _ids(Range(0, math.inf)),
}
"""Fields by name, or by struct and name; these hold where a prompt is only counted, too."""

OF_ANSWERS: dict[str, Bounds] = {
    "temperature": {"number": limits.TEMPERATURE},
    "top_p": {"number": limits.TOP_P},
    "top_k": {"integer": limits.TOP_K},
    "min_p": {"number": limits.MIN_P},
    "presence_penalty": {"number": limits.PRESENCE_PENALTY},
    "frequency_penalty": {"number": limits.FREQUENCY_PENALTY},
    "repetition_penalty": {"number": limits.REPETITION_PENALTY},
    "max_tokens": {"integer": limits.MAX_TOKENS},
    "CompletionBody.max_tokens": {"integer": limits.COMPLETION_MAX_TOKENS},
    "max_completion_tokens": {"integer": limits.MAX_TOKENS},
    "max_output_tokens": {"integer": limits.MAX_TOKENS},
    "min_tokens": {"integer": limits.MIN_TOKENS},
    "thinking_token_budget": {"integer": limits.THOUGHT_TOKENS},
    "n": {"integer": limits.CHOICES},
    "logprobs": {"integer": limits.BEST_TOKENS},
    "top_logprobs": {"integer": limits.BEST_TOKENS},
    "prompt_logprobs": {"integer": limits.BEST_TOKENS},
    "priority": {"integer": limits.PRIORITIES},
    "dimensions": {"integer": limits.DIMENSIONS},
    "stop": _STOP,
    "stop_sequences": _STOP,
    "stop_token_ids": _ids(limits.STOP_IDS),
    "logit_bias": {"object": limits.BIASES, "number": limits.BIAS},
    "allowed_token_ids": _ids(limits.ALLOWED_IDS),
    "logprob_token_ids": _ids(limits.SCORED_IDS),
    "bad_words": {"array": limits.BAD_WORDS, "string": limits.BAD_WORD_BYTES},
    "guided_regex": _REGEX,
    "regex": _REGEX,
    "guided_choice": _CHOICE,
    "choice": _CHOICE,
    "guided_grammar": _GRAMMAR,
    "grammar": _GRAMMAR,
    "ebnf": _GRAMMAR,
    "guided_whitespace_pattern": _SPACES,
    "whitespace_pattern": _SPACES,
}


def prompts(most: Range) -> Schema:
    """A text, token ids, or several of either."""
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
    several = {"type": "array", "items": {"anyOf": [{"type": "string"}, ids]}}
    return {"anyOf": [{"type": "string"}, ids, bounded(several, {"array": most})]}


def truncation() -> Schema:
    """-1, or so many tokens."""
    most = bounded({"type": "integer"}, {"integer": limits.TRUNCATED_TOKENS})
    return {"anyOf": [{"const": -1}, most, {"type": "null"}], "default": None}


def bounded(schema: Schema, bounds: Bounds) -> Schema:
    """`schema` with the bounds of its types."""
    own = _stated(schema["type"], bounds[schema["type"]]) if schema.get("type") in bounds else {}
    inner = {
        name: bounded(schema[name], bounds) for name in ("items", "additionalProperties") if _is_open(schema, name)
    }
    options = {"anyOf": [bounded(option, bounds) for option in schema["anyOf"]]} if "anyOf" in schema else {}
    return schema | own | inner | options


def _is_open(schema: Schema, name: str) -> bool:
    return isinstance(schema.get(name), dict)


def _stated(kind: str, allowed: Range) -> Schema:
    least, most = _NAMES[kind]
    least = "exclusiveMinimum" if allowed.is_open else least
    stated = {least: allowed.least} | ({most: allowed.most} if allowed.most != math.inf else {})
    return {name: bound for name, bound in stated.items() if kind in ("integer", "number") or bound or name == most}


PROMPTS: dict[str, Schema] = {
    "CompletionBody.prompt": prompts(limits.PROMPTS),
    "EmbeddingsBody.input": prompts(limits.EMBEDDED),
}
"""Fields whose types allow more than the server does."""
ANSWERED_PROMPTS = PROMPTS | {"truncate_prompt_tokens": truncation()}
