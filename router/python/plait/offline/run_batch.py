"""`plait run-batch`: a batch file through an engine, to a file of results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from pathlib import Path

from plait_proto import ExitCode

from plait.errors import DONE, SettingsError, StartError
from plait.offline.batch_input import BatchFile, BrokenLine, Line
from plait.offline.batch_results import ResultFile
from plait.offline.calls import Answer, EngineEndedError
from plait.offline.engine_thread import EngineThread
from plait.offline.progress import Progress
from plait.offline.settings import RunBatchSettings
from plait.output import say

Ask = Callable[[str, bytes], Awaitable[Answer]]
"""A path and a body; as `Calls.ask`."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it."""


def run_batch(
    batch_file: Path,
    result_file: Path,
    model: str | None,
    settings: RunBatchSettings,
    environment: MutableMapping[str, str],
) -> int:
    """Answer what the results lack; the exit code. Raises `StartError`."""
    if result_file.exists() and batch_file.exists() and result_file.samefile(batch_file):
        raise SettingsError(f"IN and OUT are both {str(batch_file)!r}; name another file for the results")
    served = settings.served()
    batch = BatchFile(batch_file)
    with ResultFile(result_file, batch) as results:
        if results:
            say(f"{len(results):,} of {len(batch):,} lines have their results; going on with the others")
        if len(results) < len(batch):
            names = settings.batch.served_model_name or ()
            try:
                _answer(batch, results, EngineThread(model, served, environment, names))
            except KeyboardInterrupt:
                say(f"Stopped: {len(results):,} of {len(batch):,} lines; the same command goes on")
                return INTERRUPTED
        broken = f", {len(batch.broken):,} of {batch_file} were broken" if batch.broken else ""
        refused = f", {results.num_refused:,} of this run were refused" if results.num_refused else ""
        say(f"{len(results):,} lines in {result_file}{broken}{refused}")
    return DONE


def _answer(batch: BatchFile, results: ResultFile, engine: EngineThread) -> None:
    calls = engine.calls
    try:
        with Progress(len(batch), len(results)) as progress:
            engine.submit(answer_lines(batch, results, calls.ask, calls.max_in_flight, progress)).result()
    except EngineEndedError as error:
        message = f"{error}; {len(results):,} of {len(batch):,} lines have results, the same command goes on"
        raise StartError(message, ExitCode.RANK_LOST) from error
    finally:
        engine.close()


async def answer_lines(batch: BatchFile, results: ResultFile, ask: Ask, max_in_flight: int, progress: Progress) -> None:
    """Write a result for each line that has none. At most `max_in_flight` are asked at a time.

    Raises what `ask` and `results` do; the other lines then have no results yet.
    """
    lines = (line for line in batch.lines() if not results.has(line))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(max_in_flight):
                group.create_task(_answer_next(lines, results, ask, progress))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _answer_next(lines: Iterator[Line], results: ResultFile, ask: Ask, progress: Progress) -> None:
    """Answer one line after the other, until no other task has left one."""
    for line in lines:
        if isinstance(line, BrokenLine):
            results.report(line)
        else:
            results.answer(line, await ask(line.url, line.body))
        progress.advance()
