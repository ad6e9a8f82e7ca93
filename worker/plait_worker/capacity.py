"""How many pages of KV cache fit on a rank."""

from __future__ import annotations

from dataclasses import dataclass

from plait_proto import ExitCode, WorkerConfig

from plait_worker.errors import WorkerError

_GIB = 2**30
_CPU_POOL_BYTES = 4 * _GIB
_CPU_SHARE = 0.25
_GPU_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes on one rank, after its weights were loaded."""

    free_bytes: int
    """Still free."""
    weight_bytes: int
    activation_bytes: int
    """Of the largest step and the captured graphs."""

    @property
    def offered_bytes(self) -> int:
        """For pages, if they may take all free memory."""
        return self.free_bytes - self.activation_bytes

    def pool_bytes(self, fraction: float) -> int:
        """For pages, if weights, activations and pages may take this fraction of the memory."""
        return int((self.free_bytes + self.weight_bytes) * fraction) - self.weight_bytes - self.activation_bytes


def cpu_pool_bytes(config: WorkerConfig, budget: MemoryBudget) -> int:
    """For pages on a CPU, by the settings."""
    if config.pages.memory_fraction is None:
        return min(_CPU_POOL_BYTES, int(budget.free_bytes * _CPU_SHARE), budget.offered_bytes)
    return budget.pool_bytes(config.pages.memory_fraction)


def gpu_pool_bytes(config: WorkerConfig, budget: MemoryBudget) -> int:
    """For pages on a GPU, by the settings; the GPU is expected to be ours alone."""
    return budget.pool_bytes(_GPU_FRACTION if config.pages.memory_fraction is None else config.pages.memory_fraction)


def choose_num_pages(config: WorkerConfig, page_bytes: int, pool_bytes: int, budget: MemoryBudget) -> int:
    """The number in the settings, or what ``pool_bytes`` hold.

    Raises ``WorkerError`` of code HARDWARE if the pages asked for do not fit, or if those that fit cannot hold one
    request of ``max_model_len`` tokens.
    """
    if config.pages.num_pages is not None:
        return _check_num_pages(config.pages.num_pages, page_bytes, budget)
    num_pages = max(0, pool_bytes) // page_bytes
    num_needed = -(-config.max_model_len // config.pages.page_size)
    if num_pages < num_needed:
        raise WorkerError(
            ExitCode.HARDWARE,
            f"one request of {config.max_model_len} tokens needs {_gib(num_needed * page_bytes)} of KV cache, "
            f"and {_gib(num_pages * page_bytes)} are there for it ({_gib(budget.free_bytes)} of memory are free, "
            f"a step takes {_gib(budget.activation_bytes)}); lower --max-model-len or --max-batch-tokens, or set "
            f"--memory-fraction or --num-pages higher",
        )
    return num_pages


def check_fits(weight_bytes: int, free_bytes: int) -> None:
    """Raise ``WorkerError`` of code HARDWARE if the weights exceed the free memory."""
    if weight_bytes > free_bytes:
        raise WorkerError(
            ExitCode.HARDWARE,
            f"the model's weights take {_gib(weight_bytes)} or more and {_gib(free_bytes)} of memory are free, "
            f"{_gib(weight_bytes - free_bytes)} too little; free memory, or serve a smaller model or --dtype bfloat16",
        )


def _check_num_pages(num_pages: int, page_bytes: int, budget: MemoryBudget) -> int:
    offered_bytes = max(0, budget.offered_bytes)
    if num_pages * page_bytes > offered_bytes:
        raise WorkerError(
            ExitCode.HARDWARE,
            f"--num-pages {num_pages} needs {_gib(num_pages * page_bytes)}, and {_gib(offered_bytes)} are there for "
            f"pages ({_gib(budget.free_bytes)} of memory are free, "
            f"a step takes {_gib(budget.activation_bytes)}): at most {offered_bytes // page_bytes} pages "
            f"fit; lower --num-pages or --max-batch-tokens",
        )
    return num_pages


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
