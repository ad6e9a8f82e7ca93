"""Fields of OpenAI's and vLLM's API that Plait does not support, with their neutral values.

A neutral value changes nothing and is accepted; null is neutral everywhere. Any other value is rejected by name.
Fields that never change an answer are ignored, as unknown names are: `metadata`, `safety_identifier`,
`prompt_cache_key`, `prompt_cache_retention`, `service_tier`, `store`, `guided_decoding_backend`.
"""

from __future__ import annotations

import msgspec

from plait.http.bodies import Json
from plait.http.body_errors import UNSUPPORTED, shown
from plait.http.errors import ApiError

Neutral = dict[str, tuple[Json, ...]]

_BOTH: Neutral = {
    "best_of": (1,),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "request_id": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "repetition_detection": (),
}

_CHAT: Neutral = {
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "moderation": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
}

_COMPLETION: Neutral = {
    "suffix": ("",),
    "thinking_token_budget": (),
    "prompt_embeds": (),
}

_EMBEDDING: Neutral = {
    "normalize": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "chat_template": (),
    "messages": (),
    "request_id": (),
    "mm_processor_kwargs": ({},),
}

UNSUPPORTED_EMBEDDING = _EMBEDDING
UNSUPPORTED_CHAT = _BOTH | _CHAT
UNSUPPORTED_COMPLETION = _BOTH | _COMPLETION


def check_supported(fields: dict[str, msgspec.Raw], unsupported: Neutral) -> None:
    """Raise `ApiError` for the first of `fields` that is unsupported and not neutral."""
    for name, raw in fields.items():
        if name in unsupported and not _is_neutral(raw, unsupported[name]):
            raise _unsupported(name, raw, unsupported[name])


def _is_neutral(raw: msgspec.Raw, neutral: tuple[Json, ...]) -> bool:
    if bytes(raw) == b"null":
        return True
    try:
        given: Json = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return False  # a number that no machine type holds
    return any(given == value and isinstance(given, bool) == isinstance(value, bool) for value in neutral)


def _unsupported(name: str, raw: msgspec.Raw, neutral: tuple[Json, ...]) -> ApiError:
    given = shown(raw)
    allowed = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
    advice = f"leave it out or send {allowed}" if neutral else "leave it out"
    return ApiError(
        400, f"`{name}` is {given}: this server does not have `{name}`; {advice}", param=name, code=UNSUPPORTED
    )
