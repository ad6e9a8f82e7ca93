"""KV events: a listener knows which pages a server has cached, and equal keys give equal hashes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing import budgets
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, StartServer

EXAMPLE = budgets.ROOT / "examples/follow_cache.py"
FLAGS = ("--page-size", "16", "--num-pages", "64", "--threads", "1", "--max-model-len", "512")


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("follow_cache", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Publishing = Callable[..., tuple[Server, list[str]]]


@pytest.fixture
def publishing(server: StartServer, check_models: Path, tmp_path: Path) -> Publishing:
    """`publishing(name, *flags)` starts a server that publishes, and gives its two addresses."""

    def start(name: str, *flags: str) -> tuple[Server, list[str]]:
        folder = tmp_path / name
        folder.mkdir(mode=0o700)
        addresses = [f"ipc://{folder}/{socket}" for socket in ("events", "replay")]
        events, replay = addresses
        words = ("--kv-events-endpoint", events, "--kv-events-replay-endpoint", replay)
        return server(check_models / "recall-gqa", *FLAGS, *words, *flags), addresses

    return start


def complete(running: Server, number: int, **fields: object) -> None:
    """Serve one prompt of 120 tokens, the same for the same number."""
    prompt = [number % 200, *range(119)]
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **fields}
    assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).status_code == 200


def hashes(addresses: list[str]) -> set[tuple[int, bytes]]:
    """What a listener that comes now learns."""
    cached = load_example().CachedPages(*addresses, "")
    cached.fetch_all()
    pages: set[tuple[int, bytes]] = cached.pages
    return pages


def test_a_listener_knows_the_cached_pages_after_evictions(publishing: Publishing) -> None:
    running, addresses = publishing("one")
    cached = load_example().CachedPages(*addresses, "")
    cached.fetch_all()
    for number in range(30):
        complete(running, number)
    metrics = read_metrics(running.url)
    assert metrics["plait_prefix_evictions_total"] > 20
    while cached.pages != hashes(addresses):
        assert cached.follow(30_000), "the listener knows other pages than the server"
    assert len(cached.pages) == metrics['plait_kv_pages{state="cached"}']
    assert running.stop() == 0


def test_equal_keys_give_equal_hashes_and_others_do_not(publishing: Publishing, tmp_path: Path) -> None:
    keys = {}
    for name, secret in (("shared", "s" * 32), ("other", "o" * 32)):
        keys[name] = tmp_path / f"{name}-key"
        keys[name].write_text(secret)
        keys[name].chmod(0o600)
    learnt = []
    for name, key in (("a", keys["shared"]), ("b", keys["shared"]), ("c", keys["other"]), ("d", None)):
        flags = ("--kv-hash-key-file", str(key)) if key else ()
        running, addresses = publishing(name, *flags)
        complete(running, 1)
        complete(running, 2, cache_salt="tenant")
        learnt.append(hashes(addresses))
    one, equal, other, drawn = learnt
    assert len(one) == 14
    assert one == equal
    assert not one & other
    assert not one & drawn
    assert not other & drawn


def test_the_example_prints_how_many_pages_are_cached(publishing: Publishing) -> None:
    running, (events, replay) = publishing("one")
    complete(running, 1)
    words = [sys.executable, str(EXAMPLE), "--events", events, "--replay", replay, "--seconds", "0.2"]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed.splitlines()[0] == "7 pages"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv-events-endpoint", "tcp://*:0"), "add --kv-events-public"),
        (("--kv-events-replay-endpoint", "tcp://127.0.0.1:*"), "needs --kv-events-endpoint"),
        (("--kv-events-endpoint", "tcp://127.0.0.1:*", "--no-prefix-cache"), "needs the prefix cache"),
        (("--kv-hash-key-file", "/no-such-file"), "cannot be read"),
    ],
)
def test_what_cannot_be_published_is_refused_with_what_to_do(
    server: StartServer, check_models: Path, flags: tuple[str, ...], words: str
) -> None:
    running = server(check_models / "recall-gqa", *flags)
    assert running.wait() == 2
    assert words in running.last_line
