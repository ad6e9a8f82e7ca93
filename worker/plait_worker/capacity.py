"""How many pages of key-value cache a rank offers."""

from __future__ import annotations

from plait_proto import ExitCode, WorkerConfig

from plait_worker.failure import Failure

_GIB = 2**30
_DEFAULT_POOL_BYTES = 4 * _GIB
_DEFAULT_SHARE = 0.25


def choose_num_pages(config: WorkerConfig, page_bytes: int, weight_bytes: int, free_bytes: int) -> int:
    """The number that the settings ask for, or what memory has room for.

    ``page_bytes`` and ``weight_bytes`` are this rank's, ``free_bytes`` the machine's after the weights were loaded; its
    ranks share it. Raises ``Failure`` of code MEMORY where the pages asked for do not fit, or where those that fit
    are too few for one request of ``max_model_len`` tokens.
    """
    share_bytes = free_bytes // config.world
    if config.num_pages is not None:
        return _asked(config.num_pages, page_bytes, share_bytes)
    num_pages = max(0, _pool_bytes(config.memory_fraction, share_bytes, weight_bytes)) // page_bytes
    num_needed = -(-config.max_model_len // config.page_size)
    if num_pages < num_needed:
        raise Failure(
            ExitCode.HARDWARE,
            f"one request of {config.max_model_len} tokens needs {_gib(num_needed * page_bytes)} of key-value cache, "
            f"and {_gib(num_pages * page_bytes)} are there for it ({_gib(share_bytes)} of memory are free); lower "
            f"--max-model-len, or set --memory-fraction or --num-pages higher",
        )
    return num_pages


def refuse_too_large(weight_bytes: int, free_bytes: int) -> None:
    """Raise ``Failure`` of code HARDWARE where the whole model's weights exceed the machine's free memory."""
    if weight_bytes > free_bytes:
        raise Failure(
            ExitCode.HARDWARE,
            f"the model's weights take {_gib(weight_bytes)} and {_gib(free_bytes)} of memory are free, "
            f"{_gib(weight_bytes - free_bytes)} too little; free memory, or serve a smaller model or --dtype bfloat16",
        )


def _pool_bytes(memory_fraction: float | None, share_bytes: int, weight_bytes: int) -> int:
    if memory_fraction is None:
        return min(_DEFAULT_POOL_BYTES, int(share_bytes * _DEFAULT_SHARE))
    return int((share_bytes + weight_bytes) * memory_fraction) - weight_bytes


def _asked(num_pages: int, page_bytes: int, share_bytes: int) -> int:
    if num_pages * page_bytes > share_bytes:
        raise Failure(
            ExitCode.HARDWARE,
            f"--num-pages {num_pages} needs {_gib(num_pages * page_bytes)} and {_gib(share_bytes)} of memory are free; "
            f"at most {share_bytes // page_bytes} pages fit",
        )
    return num_pages


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
