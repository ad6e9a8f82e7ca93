"""DeepSeek-V4's attention by TensorRT-LLM's Blackwell kernels (trtllm-gen), as flashinfer packs them.

One ragged call attends in prefill and decode rows. Entries are stored and chosen as by torch. The kernels were not run
on our hardware: the tests check the calls against a stand-in with the same contract (tests/plait_testing/trtllm_gen).

Shapes: T tokens, R rows, W the window, M entries of a list, H heads, D elements of a head.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from flashinfer.mla import trtllm_batch_decode_sparse_mla_dsv4
from torch import Tensor

from plait_worker.attention.backend import BackendRequirements
from plait_worker.attention.compressed.row_lists import ChosenEntries, EntryLists, WindowLists
from plait_worker.attention.compressed.torch_compressed import CompressedStep
from plait_worker.attention.spec import CompressedShape
from plait_worker.attention.trtllm_workspace import Scratch
from plait_worker.rows import Rows
from plait_worker.transfer import upload

WINDOW, HEAD_DIM = 128, 512
NUM_HEADS = (8, 16, 32, 64, 128)
_MULTIPLE = 4
"""Of the lists' width."""


class SparseRows(NamedTuple):
    """What each token sees."""

    index_TM: Tensor
    """int32: W raw keys, the token's own first, then entries; -1 behind the last of either."""
    lengths_T: Tensor
    """int32: W, and the entries."""


class _RowLengths(NamedTuple):
    ends_q: Tensor
    """int32 ``[R + 1]``."""
    kv_lengths_R: Tensor
    """int32."""


@dataclass(frozen=True)
class TrtllmCompressedStep(CompressedStep):
    """The attention of one step in all layers of one ratio."""

    scratch: Scratch
    _of_all_layers: list[SparseRows] = field(default_factory=list)
    """Where no indexer chooses, the first layer makes the lists of all."""

    def attend(
        self,
        q_THD: Tensor,
        raw: Tensor,
        entries: Tensor,
        window: WindowLists,
        seen: EntryLists | ChosenEntries | None,
        sinks_H: Tensor,
    ) -> Tensor:
        """See ``CompressedStep``."""
        rows = self._sparse_rows(window, seen)
        own = raw[None, None]
        out_THD: Tensor = trtllm_batch_decode_sparse_mla_dsv4(
            q_THD.contiguous(),
            own,
            self.scratch.workspace,
            rows.index_TM,
            own if seen is None else entries[:, None],
            rows.lengths_T,
            self._lengths.kv_lengths_R,
            bmm1_scale=self.shape.head_dim**-0.5,
            sinks=sinks_H,
            cum_seq_lens_q=self._lengths.ends_q,
            max_q_len=max(self.rows.lengths),
            backend="trtllm-gen",
            multi_ctas_kv_counter_buffer=self.scratch.counters,
        )
        return out_THD

    def _sparse_rows(self, window: WindowLists, seen: EntryLists | ChosenEntries | None) -> SparseRows:
        if isinstance(seen, ChosenEntries):
            return sparse_rows(window, seen)
        if not self._of_all_layers:
            self._of_all_layers.append(sparse_rows(window, seen))
        return self._of_all_layers[0]

    @cached_property
    def _lengths(self) -> _RowLengths:
        ends_R = np.add(self.rows.starts, self.rows.lengths)
        packed = np.concatenate(([0], np.cumsum(self.rows.lengths), ends_R)).astype(np.int32)
        return _RowLengths(*upload(packed, self.scratch.workspace.device).split([len(ends_R) + 1, len(ends_R)]))


def sparse_rows(window: WindowLists, seen: EntryLists | ChosenEntries | None) -> SparseRows:
    """The kernel finds how many raw keys there are from the row's length: they come first."""
    columns, num_tokens = [window.index_TW.flip(1)], len(window.index_TW)
    lengths_T = torch.full((num_tokens,), WINDOW, dtype=torch.int32, device=window.index_TW.device)
    if seen is not None and seen.width:
        index_TM = seen.of(slice(0, num_tokens))
        if isinstance(seen, ChosenEntries):
            index_TM = index_TM.sort(dim=1, descending=True).values  # what is not there comes last
        lengths_T += (index_TM >= 0).sum(dim=1, dtype=torch.int32)
        columns.append(torch.nn.functional.pad(index_TM, (0, -index_TM.shape[1] % _MULTIPLE), value=-1))
    return SparseRows(torch.cat(columns, dim=1).to(torch.int32), lengths_T)


class TrtllmCompressed:
    """``AttentionBackend`` for compute capabilities 10.0 and 10.3."""

    name = "trtllm_sparse_mla"
    is_capturable = False
    captured_prefill = None

    def __init__(self, requirements: BackendRequirements[CompressedShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        self.validate(requirements)
        self.requirements, shape = requirements, requirements.spec
        self.scratch = Scratch.of(shape.num_heads, HEAD_DIM, requirements.max_tokens, requirements.device)

    def prepare(self, rows: Rows) -> TrtllmCompressedStep:
        """The step's lists are made when the first layer asks for them."""
        return TrtllmCompressedStep(self.requirements, rows, self.scratch)

    @staticmethod
    def validate(requirements: BackendRequirements[CompressedShape]) -> None:
        """Raises ``ValueError`` with the rule that is broken."""
        shape = requirements.spec
        if (shape.head_dim, shape.window) != (HEAD_DIM, WINDOW):
            raise ValueError(
                f"its kernels take a head_dim of {HEAD_DIM} and a window of {WINDOW} tokens, "
                f"not {shape.head_dim} and {shape.window}; use torch"
            )
        if shape.num_heads not in NUM_HEADS:
            known = ", ".join(map(str, NUM_HEADS))
            raise ValueError(f"its kernels take {known} heads on a rank, not {shape.num_heads}; change --tp")
        if shape.dtype is not torch.bfloat16:
            raise ValueError("its kernels take bfloat16 queries, keys and entries; set --dtype bfloat16")
