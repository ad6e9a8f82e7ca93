"""`generate` of transformers under the completions route: one request after another, token by token.

    python tests/bench/cpu/one_stream_server.py FOLDER --port 8001

What the library gives a user who puts it behind HTTP and does no more: prompts of token ids, greedy answers,
bfloat16. Requests wait for each other; it batches nothing.
"""

from __future__ import annotations

import argparse
import json
import queue
import threading
from collections.abc import Iterator

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.streamers import BaseStreamer


class Completion(BaseModel):
    """The fields of a completion that are honoured."""

    prompt: list[int]
    max_tokens: int
    ignore_eos: bool = False


class TokenQueue(BaseStreamer):  # type: ignore[misc]
    """Token ids as they are made; None after the last."""

    def __init__(self) -> None:
        self.ids: queue.Queue[int | None] = queue.Queue()
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then each token."""
        if self._has_prompt:
            self.ids.put(int(value))
        self._has_prompt = True

    def end(self) -> None:
        """No token follows."""
        self.ids.put(None)


class Generator:
    """The model, for one request at a time."""

    def __init__(self, folder: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._turn = threading.Lock()

    def stream(self, asked: Completion) -> Iterator[str]:
        """Server-sent events, each with the usage so far."""
        with self._turn:
            tokens = TokenQueue()
            worker = threading.Thread(target=self._generate, args=(asked, tokens), daemon=True)
            worker.start()
            num_tokens = 0
            while (token := tokens.ids.get()) is not None:
                num_tokens += 1
                yield self._event(asked, token, num_tokens)
            worker.join()
            yield "data: [DONE]\n\n"

    def _generate(self, asked: Completion, tokens: TokenQueue) -> None:
        prompt = torch.tensor([asked.prompt])
        fewest = asked.max_tokens if asked.ignore_eos else 1
        try:
            self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=asked.max_tokens,
                min_new_tokens=fewest,
                streamer=tokens,
            )
        finally:
            tokens.end()

    def _event(self, asked: Completion, token: int, num_tokens: int) -> str:
        is_last = num_tokens == asked.max_tokens or token == self.tokenizer.eos_token_id
        choice = {
            "index": 0,
            "text": self.tokenizer.decode([token]),
            "finish_reason": "length" if is_last else None,
        }
        usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": num_tokens}
        return f"data: {json.dumps({'object': 'text_completion', 'choices': [choice], 'usage': usage})}\n\n"


def application(folder: str) -> FastAPI:
    app, generator = FastAPI(), Generator(folder)

    @app.get("/v1/models")
    def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": "transformers", "object": "model"}]}

    @app.post("/v1/completions")
    def complete(asked: Completion) -> StreamingResponse:
        return StreamingResponse(generator.stream(asked), media_type="text/event-stream")

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a folder's model with transformers, one request at a time.")
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    typed = parser.parse_args()
    torch.set_num_threads(typed.threads)
    uvicorn.run(application(typed.model), host="127.0.0.1", port=typed.port, log_level="warning")


if __name__ == "__main__":
    main()
