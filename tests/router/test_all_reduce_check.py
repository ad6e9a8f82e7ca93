"""The store of the preflight's all-reduce, and what is said of the outcome."""

from __future__ import annotations

from plait.nodes.all_reduce_check import CheckStore
from plait.nodes.checks import describe_reduced, find_reduce_faults
from plait_proto import ExitCode, StoreOperation, StoreReply, StoreRequest
from plait_proto.all_reduce_check import Reduced


def ask(store: CheckStore, node: int, operation: StoreOperation, key: str, value: bytes = b"") -> list[StoreReply]:
    return list(store.ask(StoreRequest(node, 7, True, operation, key, value)))


def test_who_waits_for_a_key_is_answered_once_another_node_sets_it() -> None:
    store = CheckStore()
    assert ask(store, 0, StoreOperation.GET, "address") == []
    assert ask(store, 0, StoreOperation.FIND, "address") == [StoreReply(0, 7, None)]
    assert ask(store, 1, StoreOperation.SET, "address", b"x") == [StoreReply(1, 7, b""), StoreReply(0, 7, b"x")]
    assert ask(store, 0, StoreOperation.GET, "address") == [StoreReply(0, 7, b"x")]


def test_nodes_count_together() -> None:
    store = CheckStore()
    for node in (0, 1):
        assert ask(store, node, StoreOperation.ADD, "count", (2).to_bytes(8, "little"))[0].value == b"%d" % (
            2 + 2 * node
        )


def test_a_node_cannot_fill_the_heads_memory() -> None:
    store = CheckStore()
    replies = [ask(store, 1, StoreOperation.SET, str(number), b"")[0].value for number in range(5000)]
    assert replies.count(None) == 5000 - 4096
    assert ask(CheckStore(), 1, StoreOperation.SET, "large", bytes(40_000))[0].value is None
    waiting = CheckStore()
    assert sum(len(ask(waiting, 1, StoreOperation.GET, str(number))) for number in range(5000)) == 5000 - 4096


def test_an_all_reduce_that_failed_is_named_with_what_to_open() -> None:
    found = list(find_reduce_faults({0: Reduced(), 1: Reduced(problem="it hangs")}))
    assert [(one.node, one.code) for one in found] == [(1, ExitCode.RANK_LOST)]
    assert found[0].text.startswith("it hangs; ranks exchange rows on any free TCP port")
    whole = Reduced(backend="gloo", num_bytes=4 << 20, seconds=0.002)
    assert describe_reduced(whole) == "All-reduce of 4 MiB between the nodes (gloo): 2.0 ms, 2.10 GB/s"
