"""How many pages and snapshots fit on a rank beside the slots' state, and what a model's cache asks of the settings."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from plait_proto import MAX_PAGE_SIZE, ExitCode, SlotState, WorkerConfig, family

from plait_worker.capacity import MemoryBudget, choose_num_pages
from plait_worker.errors import WorkerError
from plait_worker.models.model import Model
from plait_worker.slot_state import slot_bytes, snapshot_bytes, staged_bytes

_log = logging.getLogger(__name__)

_SNAPSHOTS_SHARE = 8
"""Snapshots take one part of memory where pages take so many."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What a model keeps beside its pages, on one rank; all zero for most."""

    slot: int = 0
    snapshot: int = 0
    reserved: int = 0
    """Of all slots, the dummy included, and of one step's raw keys."""


@dataclass(frozen=True, slots=True)
class Pools:
    """What a rank offers."""

    num_pages: int
    slot_state: SlotState | None


def state_bytes(config: WorkerConfig, model: Model[Any]) -> StateBytes:
    """Of the slots that the settings ask for."""
    specs = model.attention_specs
    slot, max_tokens = slot_bytes(specs, config.draft_tokens), config.max_batch_tokens + config.max_seqs
    snapshot = snapshot_bytes(specs, config.draft_tokens)
    return StateBytes(slot, snapshot, (config.max_seqs + 1) * slot + staged_bytes(specs, max_tokens))


def choose_pools(
    config: WorkerConfig, page_bytes: int, state: StateBytes, pool_bytes: int, budget: MemoryBudget
) -> Pools:
    """Slots first, then pages and snapshots.

    A model of dense layers alone keeps nothing in pages: it has as many as all slots can fill.

    Raises ``WorkerError``: of code HARDWARE if one of them does not fit, as ``choose_num_pages`` does; of code SETTINGS
    if the pages asked for do not hold one request.
    """
    if not state.slot:
        return Pools(choose_num_pages(config, page_bytes, pool_bytes, budget), None)
    _check_slots_fit(config, state, pool_bytes, budget)
    _check_one_request_fits(config)
    free = replace(budget, free_bytes=budget.free_bytes - state.reserved)
    left = pool_bytes - state.reserved
    asked = config.pages.num_snapshots
    of_snapshots = left // (_SNAPSHOTS_SHARE + 1) if asked is None else asked * state.snapshot
    if page_bytes:
        num_pages = choose_num_pages(config, page_bytes, left - of_snapshots, free)
        of_snapshots = num_pages * page_bytes // _SNAPSHOTS_SHARE
    else:
        num_pages = config.pages.num_pages or _num_pages_of_slots(config)
    num_snapshots = min(num_pages, of_snapshots // state.snapshot) if asked is None else asked
    if not num_snapshots and asked is None:
        _log.warning(
            "no snapshot fits into an eighth of the pages, so the prefix cache finds nothing; set --num-snapshots, or "
            "raise --num-pages"
        )
    _check_snapshots_fit(num_snapshots * state.snapshot, free.offered_bytes - num_pages * page_bytes, num_snapshots)
    return Pools(num_pages, SlotState(state.slot, state.snapshot, num_snapshots))


def _num_pages_of_slots(config: WorkerConfig) -> int:
    return config.max_seqs * -(-config.max_model_len // config.pages.page_size)


def _check_one_request_fits(config: WorkerConfig) -> None:
    num_pages, num_needed = config.pages.num_pages, -(-config.max_model_len // config.pages.page_size)
    if num_pages is not None and num_pages < num_needed:
        raise WorkerError(
            ExitCode.SETTINGS,
            f"--num-pages {num_pages} is less than one request of --max-model-len {config.max_model_len} takes, "
            f"{num_needed} pages of {config.pages.page_size} tokens; set --num-pages {num_needed} or more, or lower "
            "--max-model-len",
        )


def _check_slots_fit(config: WorkerConfig, state: StateBytes, pool_bytes: int, budget: MemoryBudget) -> None:
    offered_bytes, advice = budget.offered_bytes, ""
    if config.pages.num_pages is None:  # then pages get a share of what is free, and slots are in it
        offered_bytes, advice = min(pool_bytes, offered_bytes), ", or raise --memory-fraction"
    if state.reserved > offered_bytes:
        raise WorkerError(
            ExitCode.HARDWARE,
            f"--max-seqs {config.max_seqs} needs {_mib(state.reserved)} for the state of its slots, "
            f"{_mib(state.slot)} a slot, and {_mib(max(0, offered_bytes))} of memory are there for it; lower "
            f"--max-seqs or --max-batch-tokens{advice}",
        )


def _check_snapshots_fit(num_bytes: int, offered_bytes: int, num_snapshots: int) -> None:
    if num_bytes > offered_bytes:
        raise WorkerError(
            ExitCode.HARDWARE,
            f"{num_snapshots} snapshots need {_mib(num_bytes)}, and {_mib(max(0, offered_bytes))} are left beside the "
            "pages; lower --num-snapshots or --num-pages",
        )


def check_cache(config: WorkerConfig, model: Model[Any], device_type: str) -> None:
    """Raise ``WorkerError`` of code SETTINGS if the model's cache cannot have such pages, or has no kernel there."""
    compressed = model.config.compressed
    if compressed is None:
        return
    multiple, page_size = compressed.page_multiple, config.pages.page_size
    if page_size % multiple:
        raise WorkerError(
            ExitCode.SETTINGS,
            f"--page-size {page_size} does not hold whole entries of this model: it must be a multiple of {multiple}, "
            f"the least common one of its layers' ratios; {_fitting_page_size(multiple)}",
        )
    if device_type != "cpu":
        raise WorkerError(
            ExitCode.SETTINGS,
            f"{model.config.architecture} has no GPU kernels in this version; set --device cpu",
        )


def _fitting_page_size(multiple: int) -> str:
    """What to do, where page sizes are powers of two."""
    if multiple.bit_count() != 1:
        return "no power of two is one, so the model is not served"
    if multiple > MAX_PAGE_SIZE:
        return f"pages have {MAX_PAGE_SIZE} tokens at most, so the model is not served"
    return f"set --page-size {max(family('deepseek_v4').page_size or 0, multiple)}"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
