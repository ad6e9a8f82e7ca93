"""Ranks on several hosts share keys by way of their engine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from plait_proto import ExitCode, Fail, StoreOperation, StoreReply, StoreRequest
from plait_testing.engine_side import EngineSide, engine_side
from plait_worker.engine_store import MAX_VALUE_BYTES, EngineStore
from plait_worker.errors import EngineError
from plait_worker.link import Link

SHORT = timedelta(seconds=0.05)


@pytest.fixture
def engine() -> Iterator[EngineSide]:
    with engine_side() as side:
        yield side


@pytest.fixture
def link(engine: EngineSide) -> Iterator[Link]:
    link = Link(engine.endpoint, rank=3)
    yield link
    link.close()


def reply(engine: EngineSide, request: StoreRequest, value: bytes | None) -> None:
    engine.send(StoreReply(request.rank, request.id, value), rank=3)


def test_each_operation_is_one_request_of_the_rank(engine: EngineSide, link: Link) -> None:
    store = EngineStore(link, of_group=True)
    asked = [
        (lambda: store.set("a", "text"), (StoreOperation.SET, "a", b"text"), b"", None),
        (lambda: store.get("a"), (StoreOperation.GET, "a", b""), b"text", b"text"),
        (lambda: store.add("n", -2), (StoreOperation.ADD, "n", b"\xfe" + 7 * b"\xff"), b"5", 5),
        (lambda: store.check(["a"]), (StoreOperation.FIND, "a", b""), None, False),
        (lambda: store.wait(["a"]), (StoreOperation.GET, "a", b""), b"text", None),
    ]
    with ThreadPoolExecutor(1) as pool:
        for call, (operation, key, value), answer, result in asked:
            waiting = pool.submit(call)
            request = engine.expect(StoreRequest)
            assert request == StoreRequest(3, request.id, True, operation, key, value)
            reply(engine, request, answer)
            assert waiting.result(timeout=60) == result


def test_a_prefix_store_of_torch_reads_through_it(engine: EngineSide, link: Link) -> None:
    store = EngineStore(link, of_group=False)
    prefixed = dist.PrefixStore("group", store)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(prefixed.get, "a")
        request = engine.expect(StoreRequest)
        assert (request.key, request.of_group) == ("group/a", False)
        reply(engine, request, b"address")
        assert waiting.result(timeout=60) == b"address"


def test_answers_may_come_in_any_order(engine: EngineSide, link: Link) -> None:
    store = EngineStore(link, of_group=False)
    with ThreadPoolExecutor(2) as pool:
        waiting = {key: pool.submit(store.get, key) for key in ("a", "b")}
        requests = {request.key: request for request in (engine.expect(StoreRequest), engine.expect(StoreRequest))}
        for key in ("b", "a"):
            reply(engine, requests[key], key.encode())
            assert waiting[key].result(timeout=60) == key.encode()


def test_a_key_that_does_not_come_is_named(engine: EngineSide, link: Link) -> None:
    with pytest.raises(dist.DistStoreError, match="no rank has set a within"):
        EngineStore(link, of_group=False).wait(["a"], SHORT)
    assert engine.expect(StoreRequest).key == "a"


def test_what_the_engine_refuses_is_named(engine: EngineSide, link: Link) -> None:
    store = EngineStore(link, of_group=False)
    with pytest.raises(dist.DistStoreError, match="a has 32769 bytes; 32768 are allowed"):
        store.set("a", bytes(MAX_VALUE_BYTES + 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.set, "a", b"")
        reply(engine, engine.expect(StoreRequest), None)
        with pytest.raises(dist.DistStoreError, match="the engine's store refused a"):
            waiting.result(timeout=60)


def test_an_engine_that_gives_up_ends_the_wait(engine: EngineSide, link: Link) -> None:
    store = EngineStore(link, of_group=False)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "a")
        engine.expect(StoreRequest)
        engine.send(Fail(3, ExitCode.SETTINGS, "another model"), rank=3)
        with pytest.raises(EngineError, match="another model"):
            waiting.result(timeout=60)
    began = time.monotonic()
    with pytest.raises(EngineError, match="another model"):
        store.get("a")
    assert time.monotonic() - began < store.timeout.total_seconds(), "it is not waited for"
