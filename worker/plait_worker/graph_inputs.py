"""The integers that the host writes for a captured step, in one array. Page tables and last tokens are on the device.

Shapes: as in ``plait_worker.graph_sizes``; I cached tokens of the prefill rows. Small letters are a step's own counts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait_worker.batch import positions, without_lookaheads
from plait_worker.graph_sizes import GraphSize
from plait_worker.rows import DeviceContext, DeviceLengths, Rows
from plait_worker.slots import Slots
from plait_worker.step_inputs import Ints, StepInputs
from plait_worker.transfer import upload


class GraphInputs:
    """The integers that a replay reads, in one tensor."""

    def __init__(self, size: GraphSize, slots: Slots) -> None:
        prompt, rows = size.prompt_tokens, size.num_rows
        ends = size.prompt_rows + 1
        of_tokens, of_rows = [prompt, size.num_tokens, size.num_tokens], [rows, rows, rows]
        context = size.context_tokens or 0
        self.widths = [*of_tokens, *of_rows, ends, ends, size.prompt_rows, context, context]
        self.size = size
        self.dummy_slot = slots.dummy_slot
        self.values = torch.zeros(sum(self.widths), dtype=torch.int64, device=slots.device)
        self.fill(None)

    def fill(self, inputs: StepInputs | None) -> None:
        """Write a step's integers; without one all rows are the dummy slot's."""
        values = np.zeros(self.values.shape[0], dtype=np.int64)
        tokens, position_ids, row_of, slots, sampling, sampled, ends_q, ends_kv, kv, cached_row, cached_at = np.split(
            values, np.cumsum(self.widths[:-1])
        )
        size = self.size
        cached_row[:] = max(size.prompt_rows - 1, 0)
        row_of[: size.prompt_tokens] = max(size.prompt_rows - 1, 0)
        row_of[size.prompt_tokens :] = np.arange(size.prompt_rows, size.num_rows)
        slots[:] = sampled[:] = self.dummy_slot
        if inputs is not None:
            num_prefill, num_decode = inputs.num_prefill, len(inputs.slots_R) - inputs.num_prefill
            num_prompt = inputs.num_tokens - num_decode
            ends_R = inputs.lengths_R.cumsum()
            at_R = _concat_ranges(num_prefill, num_decode, size.prompt_rows)
            at_t = _concat_ranges(num_prompt, num_decode, size.prompt_tokens)
            tokens[:num_prompt] = without_lookaheads(inputs)
            position_ids[at_t] = positions(inputs, ends_R)
            row_of[:num_prompt] = np.arange(num_prefill).repeat(inputs.lengths_R[:num_prefill])
            slots[at_R] = inputs.slots_R
            last_s = at_t[ends_R[inputs.samples_R] - 1]
            sampling[: len(last_s)] = last_s
            sampled[: len(last_s)] = inputs.slots_R[inputs.samples_R]
            kv[:num_prefill] = (inputs.starts_R + inputs.lengths_R)[:num_prefill]
            ends_q[1:] = num_prompt
            ends_q[1 : num_prefill + 1] = ends_R[:num_prefill]
            ends_kv[1:] = kv.cumsum()
            if size.context_tokens is not None:
                _fill_context_indices(inputs.starts_R[:num_prefill], cached_row, cached_at)
        self.values.copy_(upload(values, self.values.device))

    @property
    def sampled_slots(self) -> Tensor:
        """int64 ``[R]``: slots of the rows that sample, in the order of their logits, padded with the dummy slot."""
        sampled: Tensor = self.values.split(self.widths)[5]
        return sampled

    def rows(self, slots: Slots) -> Rows:
        """The model's view of the step."""
        size = self.size
        tokens, position_ids, row_of, of_rows, sampling, _, ends_q, ends_kv, kv, *cached = self.values.split(
            self.widths
        )
        last = slots.last_tokens(of_rows[size.prompt_rows :])
        lengths = DeviceLengths(
            ends_q.to(torch.int32),
            ends_kv.to(torch.int32),
            kv.to(torch.int32),
            row_of,
            size.prompt_tokens,
            slots.max_tokens,
            None if size.context_tokens is None else DeviceContext(*cached),
        )
        return Rows(
            num_prefill=size.prompt_rows,
            slots=[],
            starts=[],
            lengths=[size.prompt_tokens, *[0] * (size.prompt_rows - 1)][: size.prompt_rows] + [1] * size.decode_rows,
            token_ids_T=torch.cat((tokens, last)),
            positions_T=position_ids,
            page_table_RW=slots.page_table(of_rows, slots.max_tokens),
            sample_index_S=sampling,
            device_lengths=lengths if size.prompt_rows else None,
        )


def _concat_ranges(num_first: int, num_second: int, begin_second: int) -> Ints:
    """Indices of both kinds, if the second begins at a fixed index."""
    return np.concatenate((np.arange(num_first), begin_second + np.arange(num_second)))


def _fill_context_indices(contexts_p: Ints, row_I: Ints, position_I: Ints) -> None:
    """Write row and position of each cached token, row by row; the rest of the arrays keeps its values."""
    total = int(contexts_p.sum())
    row_I[:total] = np.arange(len(contexts_p)).repeat(contexts_p)
    position_I[:total] = np.arange(total) - (contexts_p.cumsum() - contexts_p).repeat(contexts_p)
