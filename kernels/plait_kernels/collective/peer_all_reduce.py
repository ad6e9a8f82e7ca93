"""All-reduce, residual and RMS norm in one launch, over memory that peers write into (``peer_all_reduce.cu``).

The id of the largest logit goes the same way. Shapes: N rows, D the width, U a rank's shard of the vocabulary.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from plait_kernels.nvrtc import Kernel, compile_kernels, no_compiler_reason

_SOURCE = Path(__file__).with_name("peer_all_reduce.cu")
EMPTY = 0x80008000
"""What memory holds that no peer has written."""
_SLOTS, MAX_RANKS, _MAX_BLOCKS = 2, 8, 512
VECTOR_BYTES = 16
MAX_THREADS = 1024
_STATE = struct.Struct(f"<2I3Q{MAX_RANKS}Q{_MAX_BLOCKS}II")
"""``State`` of ``peer_all_reduce.cu``."""
_SPIN_OFFSET = struct.calcsize("<2IQ")


@dataclass(frozen=True, slots=True)
class Lost:
    """A rank waited for a peer in vain."""

    rank: int
    peer: int
    """The rank that it waited for."""
    launch: int
    """Launches before it."""
    place: int
    """As the call gave it."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What all ranks of a replica must have in common."""

    max_rows: int
    """N at most."""
    width: int
    """D."""
    dtype: torch.dtype
    max_blocks: int
    """Of a launch, up to 512; all of them must be resident at once, since each waits for its peers'."""
    spin_seconds: float = 20.0
    """After which a peer is given up."""

    def memory_bytes(self, world: int) -> int:
        """What each rank's memory must hold."""
        return _SLOTS * (world - 1) * self.max_rows * self.width * self.dtype.itemsize


def unsupported_reason(world: int, width: int, dtype: torch.dtype) -> str | None:
    """Why the kernel does not take rows of this width; None if it does."""
    if world > MAX_RANKS:
        return f"takes up to {MAX_RANKS} ranks, not {world}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 or float16, not {dtype}"
    if width * dtype.itemsize % VECTOR_BYTES or width * dtype.itemsize > 2 * MAX_THREADS * VECTOR_BYTES:
        return f"takes widths that are a multiple of 8 up to 16384, not {width}"
    return no_compiler_reason()


class PeerAllReduce:
    """One rank's side. All ranks make the same calls in the same order, on one stream."""

    def __init__(self, rank: int, memories: Sequence[int], limits: Limits, device: torch.device) -> None:
        """``memories`` are the addresses on this device of every rank's memory, filled with ``EMPTY``."""
        self._limits = limits
        self._shape = row_shape(limits)
        self._kernels = compile_for(limits, device)
        self._watch = Watch(rank, memories, limits, device)

    def supports(self, partial_ND: Tensor) -> bool:
        """Whether a call fits."""
        num_rows, width = partial_ND.shape
        fits = 0 < num_rows <= self._limits.max_rows and width == self._limits.width
        return fits and partial_ND.is_contiguous() and partial_ND.dtype == self._limits.dtype

    def add_rms_norm(
        self, partial_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float, place: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See ``plait_kernels.collective.reference.add_partials_rms_norm``; ``place`` is reported if a peer is lost."""
        normed_ND, sum_ND = torch.empty_like(residual_ND), torch.empty_like(residual_ND)
        num_rows, shape = partial_ND.shape[0], self._shape
        blocks = (min(num_rows, self._limits.max_blocks, _MAX_BLOCKS), shape.threads, 0)
        given = (partial_ND, residual_ND, weight_D, normed_ND, sum_ND, num_rows, shape.vectors)
        self._kernels["all_reduce_add_rms_norm"](blocks, *given, float(eps), place, self._watch.state, pdl=True)
        return normed_ND, sum_ND

    def supports_logits(self, logits_NU: Tensor) -> bool:
        """Whether ``largest_logit`` takes them."""
        num_rows = logits_NU.shape[0]
        return 0 < num_rows <= self._limits.max_rows and logits_NU.dtype == self._limits.dtype

    def largest_logit(self, logits_NU: Tensor, own_ids_N: Tensor, first: int, num_own: int, place: int = 0) -> Tensor:
        """See ``plait_kernels.collective.reference.largest_logit``, of which this is one rank's side.

        ``own_ids_N``, int64, are the ids of the largest of this rank's ``num_own`` logits, of which token ``first`` is
        the first; they are not read if it has none. ``NO_TOKEN`` of one rank is the row's.
        """
        ids_N = torch.empty(logits_NU.shape[0], dtype=torch.int64, device=logits_NU.device)
        given = (logits_NU, logits_NU.stride(0), own_ids_N, ids_N, len(ids_N), first, num_own)
        self._kernels["largest_logit"](
            (1, min(-(-len(ids_N) // 32) * 32, MAX_THREADS), 0), *given, place, self._watch.state, pdl=True
        )
        return ids_N

    def limit_spins(self, seconds: float) -> None:
        """Give a peer up after so long, in launches that the host makes or replays from now on."""
        self._watch.limit_spins(seconds)

    @property
    def lost(self) -> Lost | None:
        """The first wait that was given up; results after it are wrong. Costs nothing: it is in the host's memory."""
        return self._watch.lost


class Watch:
    """What the kernels of a rank know of the others, and their report of one that did not come."""

    def __init__(self, rank: int, memories: Sequence[int], limits: Limits, device: torch.device) -> None:
        """As ``PeerAllReduce``."""
        self._report = torch.zeros(5, dtype=torch.int32, pin_memory=True)
        filled = [*memories, *[0] * (MAX_RANKS - len(memories))]
        capacity = limits.max_rows * row_shape(limits).vectors
        spin_nanoseconds = int(limits.spin_seconds * 1e9)
        state = _STATE.pack(
            *(rank, len(memories), capacity, spin_nanoseconds, self._report.data_ptr()),
            *filled,
            *[0] * (_MAX_BLOCKS + 1),
        )
        self.state = torch.frombuffer(bytearray(state), dtype=torch.uint8).to(device)
        torch.cuda.synchronize(device)

    def limit_spins(self, seconds: float) -> None:
        """See ``PeerAllReduce``."""
        nanoseconds = torch.tensor([int(seconds * 1e9)], dtype=torch.int64).view(torch.uint8)
        self.state[_SPIN_OFFSET : _SPIN_OFFSET + 8].copy_(nanoseconds)

    @property
    def lost(self) -> Lost | None:
        """See ``PeerAllReduce``."""
        is_lost, *rest = self._report.tolist()
        return Lost(*rest) if is_lost else None


@dataclass(frozen=True, slots=True)
class RowShape:
    """How a row is divided among the threads of a block."""

    vectors: int
    """Of 16 bytes."""
    vectors_per_thread: int
    threads: int


def row_shape(limits: Limits) -> RowShape:
    """Of rows that ``unsupported_reason`` allows."""
    vectors = limits.width * limits.dtype.itemsize // VECTOR_BYTES
    per_thread = 1 if vectors <= MAX_THREADS else 2
    return RowShape(vectors, per_thread, -(-vectors // per_thread // 32) * 32)


def compile_for(limits: Limits, device: torch.device) -> dict[str, Kernel]:
    """The kernels of ``peer_all_reduce.cu`` by name."""
    return _compile(limits.dtype, row_shape(limits).vectors_per_thread, device)


@functools.cache
def _compile(dtype: torch.dtype, vectors: int, device: torch.device) -> dict[str, Kernel]:
    defines = (f"VECTORS={vectors}", "PDL", *(("IS_HALF",) if dtype == torch.float16 else ()))
    return compile_kernels(
        _SOURCE, ("all_reduce_add_rms_norm", "add_copied_rms_norm", "largest_logit"), defines, device
    )
