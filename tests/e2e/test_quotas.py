"""Keys at their bounds, on a running server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from plait_testing.running_server import Server, start_server
from plait_testing.slow_steps import SlowSteps

TIMEOUT = 120
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True, "temperature": 0}
TOKENS = "whole tokens_per_minute=30\nstreamed tokens_per_minute=30\nleft tokens_per_minute=3000\n"
LONG = BODY | {"max_tokens": 4000, "stream": True}


@dataclass(frozen=True)
class Shared:
    server: Server
    keys: Path

    def ask(self, key: str, **fields: object) -> httpx.Response:
        return httpx.post(self.server.url + COMPLETIONS, json=BODY | fields, headers=bearer(key), timeout=TIMEOUT)


@pytest.fixture(scope="module")
def shared(check_models: Path, recall_steps: SlowSteps, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("few name=crawler max_running=2\nseldom requests_per_minute=3\nfree\n" + TOKENS)
    keys.chmod(0o600)
    flags = ("--threads=1", "--max-seqs=8", f"--api-key-file={keys}", "--enable-log-requests")
    with recall_steps.of_servers():
        server = start_server(keys.with_name("log"), check_models / "recall-gqa", *flags)
    assert server.url, server.errors
    yield Shared(server, keys)
    server.kill()


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def told(answer: httpx.Response) -> str:
    assert answer.status_code == 429
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    return str(answer.json()["error"]["message"])


def test_a_key_with_two_streams_waits_for_their_end_and_others_do_not(shared: Shared, recall_steps: SlowSteps) -> None:
    url = shared.server.url + COMPLETIONS
    with httpx.Client(timeout=TIMEOUT) as client, recall_steps.within(), ExitStack() as streams:
        running = [
            streams.enter_context(client.stream("POST", url, json=LONG, headers=bearer("few"))).iter_lines()
            for _ in range(2)
        ]
        assert [next(lines)[:7] for lines in running] == ["data: {"] * 2
        assert "max_running=2 is its bound" in told(shared.ask("few"))
        assert shared.ask("free").status_code == 200
        shared.keys.write_text("few name=crawler max_running=3\nseldom requests_per_minute=3\nfree\n" + TOKENS)
        wait_until(lambda: shared.ask("few").status_code == 200)
        assert [next(lines) is not None for lines in running] == [True, True]
    wait_until(lambda: shared.ask("few").status_code == 200)
    assert " key=crawler" in shared.server.errors


def test_a_key_begins_as_many_requests_a_minute_as_its_line_says(shared: Shared) -> None:
    answers = [shared.ask("seldom") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert "requests_per_minute=3 is its bound" in told(answers[-1])
    assert shared.ask("free").status_code == 200


@pytest.mark.parametrize("key", ["whole", "streamed"])
def test_a_key_takes_as_many_tokens_a_minute_as_its_line_says(shared: Shared, key: str) -> None:
    """Each request has 3 + 8: the third passes 30, and the fourth is refused."""
    prompt = {"prompt": [5, 6, 7], "stream": key == "streamed"}
    answers = [shared.ask(key, **prompt) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert "took 33 tokens, where tokens_per_minute=30 is its bound" in told(shared.ask(key))


def test_tokens_of_a_stream_that_was_left_count(shared: Shared, recall_steps: SlowSteps) -> None:
    long = LONG | {"prompt": [5] * 3000}
    with recall_steps.within():
        url = shared.server.url + COMPLETIONS
        with httpx.stream("POST", url, json=long, headers=bearer("left"), timeout=TIMEOUT) as answer:
            lines = answer.iter_lines()
            assert next(lines)
            assert shared.ask("left").status_code == 200
    statuses: list[int] = []
    while 429 not in statuses and len(statuses) < 50:  # they take far less than 3000 themselves
        time.sleep(0.1)
        statuses.append(shared.ask("left").status_code)
    assert statuses[-1] == 429


def wait_until(holds: object) -> None:
    assert callable(holds)
    deadline = time.monotonic() + TIMEOUT
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
