"""What `generate` and `chat` take, as bodies of the API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from plait.http.bodies import Json
from plait.offline.sampling_params import SamplingParams

T = TypeVar("T")


class TextPrompt(TypedDict):
    """vLLM's form of a text."""

    prompt: str


class TokensPrompt(TypedDict):
    """vLLM's form of token ids."""

    prompt_token_ids: list[int]


Prompt = str | list[int] | TextPrompt | TokensPrompt
Prompts = Prompt | Sequence[Prompt]
Message = Mapping[str, Json]
Messages = Sequence[Message] | Sequence[Sequence[Message]]
Params = SamplingParams | Sequence[SamplingParams] | None
_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def prompts_of(prompts: Prompts) -> list[str | list[int]]:
    """Texts or token ids; raises `ValueError` for anything else."""
    if isinstance(prompts, str | Mapping) or (prompts and all(isinstance(it, int) for it in prompts)):
        return [_prompt(prompts)]
    return [_prompt(prompt) for prompt in prompts]


def _prompt(prompt: Any) -> str | list[int]:
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Sequence) and all(isinstance(it, int) for it in prompt):
        return list(prompt)
    raise ValueError(f"a prompt is {prompt!r:.100}; give a text or a list of token ids, or a list of these")


def conversations_of(messages: Messages) -> list[list[Message]]:
    """One list of messages for each answer."""
    if messages and isinstance(messages[0], Mapping):
        return [list(messages)]  # type: ignore[arg-type]
    return [list(one) for one in messages]  # type: ignore[arg-type]


def params_of(params: Params, num_prompts: int) -> list[SamplingParams]:
    """Those of each prompt; raises `ValueError` if there are not as many."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if len(params) != num_prompts:
        raise ValueError(f"{len(params)} SamplingParams for {num_prompts} prompts; give one, or one for each prompt")
    return list(params)


def completion_body(prompt: str | list[int], params: SamplingParams) -> dict[str, Json]:
    return {"prompt": [prompt]} | _IDS | params.fields()


def chat_body(messages: list[Message], params: SamplingParams, options: Mapping[str, Json]) -> dict[str, Json]:
    """`options` are further fields of the API's body."""
    fields = params.fields()
    if (num_best := fields.pop("logprobs", None)) is not None:
        fields |= {"logprobs": True, "top_logprobs": num_best}
    return {"messages": messages} | _IDS | fields | dict(options)
