"""Whether nodes reach each other: each answers the others on an authenticated port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from plait.errors import SettingsError
from plait.nodes.channel import Dialler, Listener
from plait.nodes.key_files import NodeKeys

PROBE_SECONDS = 5.0


async def answer_probes(listener: Listener) -> None:
    """Send each message back. Returns never."""
    while True:
        _, connection, content = await listener.receive()
        listener.send(connection, content)


async def probe(keys: NodeKeys, node: int, targets: Mapping[int, tuple[str, int]]) -> dict[int, str | None]:
    """Why each of the `targets` (address and port by node) cannot be reached; None if it can."""
    problems = await asyncio.gather(*(_probe(keys, node, other, *where) for other, where in targets.items()))
    return dict(zip(targets, problems, strict=True))


async def _probe(keys: NodeKeys, node: int, other: int, address: str, port: int) -> str | None:
    with Dialler(keys, node, other, address, port) as dialler:
        dialler.send(b"")
        tasks = [asyncio.create_task(dialler.receive()), asyncio.create_task(dialler.watch())]
        done, pending = await asyncio.wait(tasks, timeout=PROBE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if not done:
            return f"no answer within {PROBE_SECONDS:.0f} s; open all TCP ports between the nodes, or check the route"
        problem = done.pop().exception()
        return problem.message if isinstance(problem, SettingsError) else None
