"""What the front door serves, for its OpenAPI document."""

from __future__ import annotations

from plait.http import answer_bodies as answers
from plait.http import answer_items as items
from plait.http.errors import MESSAGES_PATH
from plait.http.openapi import METRICS_TYPE, PAGE_TYPE, Api, Body, Operation
from plait.http.openapi_bodies import BODIES, body_schemas

_READING = (413, 429, 500)
_GENERATING = (*_READING, 404, 410, 504)
OPERATIONS: dict[str, Operation] = {
    "/": Operation("A page to chat with the model", None, media=PAGE_TYPE),
    "/openapi.json": Operation("This document", answers.OpenDocument),
    "/v1/models": Operation("List the served model, by each of its names", answers.Models),
    "/v1/models/{model}": Operation("Describe a served model", answers.ModelCard, (404,)),
    "/v1/chat/completions": Operation("Answer a chat", answers.ChatAnswer, _GENERATING, streams=True),
    "/v1/completions": Operation("Continue prompts", answers.CompletionAnswer, _GENERATING, streams=True),
    "/v1/responses": Operation("Answer as OpenAI's Responses", items.ResponseAnswer, _GENERATING, streams=True),
    "/v1/responses/input_tokens": Operation("Count a response's input", answers.CountedResponse, (*_READING, 404)),
    MESSAGES_PATH: Operation("Answer as Anthropic's Messages", items.MessageAnswer, _GENERATING, streams=True),
    f"{MESSAGES_PATH}/count_tokens": Operation("Count a message's input", answers.CountedMessages, (*_READING, 404)),
    "/v1/embeddings": Operation("A vector for each input", answers.EmbeddingsAnswer, _GENERATING),
    "/tokenize": Operation("The tokens of a text or a chat", answers.Tokenized, (*_READING, 404)),
    "/detokenize": Operation("The text of tokens", answers.Detokenized, (*_READING, 404)),
    "/tokenizer_info": Operation("What a remote tokenizer needs to know", answers.TokenizerInfo, (429,)),
    "/health": Operation("The process runs and its engine steps, or idles without being stuck", answers.Health),
    "/ready": Operation("Requests are taken now", answers.Health),
    "/ping": Operation("As /health", answers.Health),
    "/metrics": Operation("Prometheus metrics", None, media=METRICS_TYPE),
    "/version": Operation("The server's version", answers.Version),
    "/load": Operation("Requests that are not answered yet", answers.Load),
}


def front_door(models: tuple[str, ...], open_paths: frozenset[str] | None) -> Api:
    """Of a server of models with these names."""
    bodies = {path: Body(schema) for path, schema in BODIES.items()}
    return Api(OPERATIONS, bodies, body_schemas(models), {"model": {"type": "string", "enum": [*models]}}, open_paths)
