"""The end of a lost replica's ranks. Those that hang say first where."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from plait_proto import NO_RESULT

from plait.launch.worker import FAILED_SECONDS, Worker
from plait.output import say


async def end_lost(workers: Iterable[Worker], reason: str, seconds: float = FAILED_SECONDS) -> None:
    """End what is left of a replica that was lost for this reason; its ranks may take so long to end by themselves."""
    await asyncio.gather(*(_end(worker, reason, seconds) for worker in workers))


async def _end(worker: Worker, reason: str, seconds: float) -> None:
    if NO_RESULT in reason and (problem := await worker.write_stacks()) is not None:
        say(f"note: worker {worker.rank} has not written where its threads are: {problem}")
    await worker.end_after_failure(seconds)
