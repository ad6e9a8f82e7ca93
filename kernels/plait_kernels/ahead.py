"""Our Triton kernels compiled before they are launched, several at a time.

Triton compiles a kernel where it is first launched, and builds its launcher there: a start without its cache waits for
one after the other. In a rehearsal the same launches only say what is to be compiled, so that what threads then compile
is what later launches look for.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import triton
from triton.runtime.jit import JITFunction

_OURS = __name__.partition(".")[0] + "."


@contextmanager
def rehearsal(num_threads: int) -> Iterator[list[str]]:
    """No kernel of ours is launched inside, so that what one would write is what lay there; others are.

    Those that are not compiled yet are on leaving, as far as they can be; a launch says later why one cannot. The list
    then names them. A thread of their own has no device but the first.
    """
    ready: list[str] = []
    with ThreadPoolExecutor(num_threads) as threads:
        mode = triton.AsyncCompileMode(threads, ignore_errors=True)
        with mode, _nothing_launched():
            yield ready
            compiling = list(mode.future_kernels.values())
        compiled = [future.kernel for future in compiling if future.kernel is not None]
        ready.extend(name for name in threads.map(_load, compiled) if name)


@contextmanager
def _nothing_launched() -> Iterator[None]:
    launch = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        is_ours = self.module.startswith(_OURS)
        return launch(self, *args, grid=grid, warmup=warmup or is_ours, **options)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = launch


def _load(kernel: Any) -> str | None:
    """The kernel's name, ready to be launched; None where the device does not take it, which its launch says."""
    with suppress(Exception):
        kernel.run  # noqa: B018 (Triton loads it when asked for it)
        return str(kernel.name)
    return None
