"""Whether the ranks of a replica agree on all that their collectives depend on.

Ranks that differ would wait for each other for ever, or compute different steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import msgspec
import torch
from plait_proto import ExitCode

from plait_worker.errors import WorkerError
from plait_worker.parallel import Parallel

_log = logging.getLogger(__name__)

Facts = Mapping[str, str]
"""What a rank found, by the name that a message shows."""
_UNEVEN = 0.05
"""Share of the most pages by which a rank may have fewer without a line in the log."""


def check_agreement(facts: Facts, parallel: Parallel) -> None:
    """Raise ``WorkerError`` of code HARDWARE on every rank, with what differs, unless all ranks give the same facts."""
    if parallel.world == 1:
        return
    of_ranks = gather_facts(facts, parallel)
    names = dict.fromkeys(name for each in of_ranks for name in each)
    different = [name for name in names if len({each.get(name) for each in of_ranks}) > 1]
    if different:
        table = "; ".join(f"{name}: {_describe(name, of_ranks)}" for name in different)
        ranks = f"{parallel.world} ranks {parallel.setting}"
        raise WorkerError(
            ExitCode.HARDWARE,
            f"the {ranks} differ in {len(different)} of {len(names)} things: {table}. They must "
            "be the same on all: serve on GPUs of one kind (CUDA_VISIBLE_DEVICES chooses them), with one installation",
        )


def gather_facts(facts: Facts, parallel: Parallel) -> list[dict[str, str]]:
    """Every rank's, in rank order."""
    own = msgspec.json.encode(facts)
    sizes = parallel.all_gather(torch.tensor([len(own)])).tolist()
    return [msgspec.json.decode(each, type=dict[str, str]) for each in parallel.exchange(own.ljust(max(sizes)))]


def warn_of_uneven_pages(num_pages: int, parallel: Parallel) -> None:
    """Log on rank 0 if ranks have room for very different numbers of pages: the least counts for all."""
    if parallel.world == 1:
        return
    of_ranks = parallel.all_gather(torch.tensor([num_pages])).tolist()
    if parallel.rank == 0 and (line := describe_uneven_pages(of_ranks)) is not None:
        _log.warning("%s", line)


def describe_uneven_pages(num_pages: Sequence[int]) -> str | None:
    """The line for these numbers of pages by rank; None if they differ by no more than a twentieth."""
    least, most = min(num_pages), max(num_pages)
    if most - least <= most * _UNEVEN:
        return None
    listed = ", ".join(f"{pages} on rank {rank}" for rank, pages in enumerate(num_pages))
    return (
        f"the ranks have room for different numbers of pages: {listed}; every rank takes {least}. "
        f"Free the memory of rank {num_pages.index(least)}'s GPU to use {most - least} more"
    )


def _describe(name: str, of_ranks: Sequence[Mapping[str, str]]) -> str:
    return ", ".join(f"{each.get(name, 'none')} on rank {rank}" for rank, each in enumerate(of_ranks))
