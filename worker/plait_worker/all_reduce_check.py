"""``python -m plait_worker.all_reduce_check --node N --nodes W``: time an all-reduce between nodes, a process on each.

Nothing is loaded yet. The processes meet by way of their launchers, over standard input and output, so that no port is
open to strangers; see ``plait_proto.all_reduce_check``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from concurrent.futures import Future
from datetime import timedelta

import torch
import torch.distributed as dist
from plait_proto import ExitCode, StoreOperation, StoreRequest
from plait_proto.all_reduce_check import ASKED, DONE, Reduced, decode_reply, encode_line

from plait_worker.engine_store import EngineStore
from plait_worker.errors import first_line
from plait_worker.machine import die_with_parent
from plait_worker.rendezvous import forbid_multicast

NUM_BYTES = 4 << 20
NUM_ROUNDS = 10


class LauncherStore:
    """Passes what torch asks of its store to the launcher; a thread of its own reads the answers."""

    def __init__(self, node: int) -> None:
        """``node`` is this process's number among all."""
        self._node = node
        self._asked: dict[int, Future[bytes | None]] = {}
        self._writing = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, operation: StoreOperation, key: str, value: bytes, *, of_group: bool) -> Future[bytes | None]:
        """Ask; the answer comes once there is one."""
        answer: Future[bytes | None] = Future()
        with self._writing:
            number = len(self._asked)
            self._asked[number] = answer
            write(ASKED, encode_line(StoreRequest(self._node, number, of_group, operation, key, value)))
        return answer

    def _read(self) -> None:
        for line in sys.stdin.buffer:
            reply = decode_reply(line)
            self._asked[reply.id].set_result(reply.value)


def write(kind: str, content: bytes) -> None:
    """Write a line for the launcher."""
    sys.stdout.buffer.write(kind.encode() + content + b"\n")
    sys.stdout.buffer.flush()


def reduce(node: int, num_nodes: int, seconds: float, *, on_gpu: bool) -> Reduced:
    """Meet the others and reduce a tensor several times."""
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    backend = "nccl" if on_gpu else "gloo"
    store = EngineStore(LauncherStore(node), of_group=True)
    limit = timedelta(seconds=seconds)
    store.set_timeout(limit)
    names = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    try:
        dist.init_process_group(names, store=store, rank=node, world_size=num_nodes, timeout=limit)
        ones = torch.ones(NUM_BYTES // 4, device=device)
        times = [_timed(ones.clone(), device) for _ in range(NUM_ROUNDS)]
    except (RuntimeError, ValueError) as error:
        return Reduced(problem=first_line(error), backend=backend)
    return Reduced(backend=backend, num_bytes=NUM_BYTES, seconds=statistics.median(times[1:]))


def _timed(tensor: torch.Tensor, device: torch.device) -> float:
    began = time.perf_counter()
    dist.all_reduce(tensor)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _give_up(seconds: float) -> None:
    """Say that the time is over, wherever the other thread waits."""
    write(DONE, encode_line(Reduced(problem=f"no all-reduce got through within {seconds:g} s")))
    os._exit(int(ExitCode.RANK_LOST))


def main() -> None:
    """Check, and say how it went in the last line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--node", type=int, required=True, metavar="N")
    parser.add_argument("--nodes", type=int, required=True, metavar="W")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--seconds", type=float, required=True, metavar="S", help="then it gives up")
    parser.add_argument("--parent", type=int, required=True, metavar="PID", help="the launcher; both end together")
    given = parser.parse_args()
    die_with_parent(given.parent)
    forbid_multicast()
    timer = threading.Timer(given.seconds, _give_up, [given.seconds])
    timer.daemon = True
    timer.start()
    reduced = reduce(given.node, given.nodes, given.seconds, on_gpu=given.device == "cuda")
    write(DONE, encode_line(reduced))
    os._exit(0)  # other processes may still wait for this one's connections


if __name__ == "__main__":
    main()
