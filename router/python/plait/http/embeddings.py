"""`POST /v1/embeddings`: prompts whose hidden states are pooled, and no output."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from plait.http.api import EmbeddingFields, GenerateRequest
from plait.http.bodies import Integer, SamplingFields, TruncationSide
from plait.http.body_errors import field_error
from plait.http.body_reader import ServedNames, decode, served_name
from plait.http.identity import ClientIdentity
from plait.http.unsupported import UNSUPPORTED_EMBEDDING
from plait.http.validate import ANONYMOUS, prompts_of
from plait.settings import Pooling


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/embeddings`."""

    input: str | list[str | Integer | list[Integer]]
    """A text, a list of texts, a list of token ids, or a list of such lists."""
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Integer | None = None
    """Leading elements that are kept; the vector then has length 1."""
    user: Annotated[str, Meta(max_length=1024)] | None = None
    add_special_tokens: bool | None = None
    """vLLM's; so are the following."""
    truncate_prompt_tokens: Integer | None = None
    truncation_side: TruncationSide | None = None
    priority: Integer | None = None


def embeddings_reader(pooling: Pooling) -> Callable[[bytes, ServedNames, ClientIdentity], GenerateRequest]:
    """What reads the body of `POST /v1/embeddings`; it raises `ApiError`."""

    def read_embeddings(raw: bytes, served: ServedNames, client: ClientIdentity = ANONYMOUS) -> GenerateRequest:
        body = decode(raw, EmbeddingsBody, UNSUPPORTED_EMBEDDING)
        prompts = prompts_of("input", body.input)
        if not prompts:
            raise field_error("input", "is empty; send at least one text")
        return GenerateRequest(
            kind="completion",
            id=f"embd-{os.urandom(12).hex()}",
            created=0,
            model=served_name(body.model, served),
            stream=False,
            include_usage=False,
            prompts=prompts,
            max_tokens=0,
            sampling=SamplingFields(),
            add_special_tokens=body.add_special_tokens,
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            truncation_side=body.truncation_side or "left",
            priority=body.priority or 0,
            tenant=client.tenant(body.user),
            salt=client.salt(None),
            embedding=EmbeddingFields(
                pooling=pooling, dimensions=body.dimensions, is_base64=body.encoding_format == "base64"
            ),
        )

    return read_embeddings
