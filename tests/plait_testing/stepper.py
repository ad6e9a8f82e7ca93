"""Requests stepped by hand over whatever computes plans: slots, pages and positions as a scheduler keeps them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from plait_proto import IS_LAST_CHUNK, LOOKAHEAD, NewSlot, Plan, StepResult


@dataclass(frozen=True)
class Record:
    """Log-probability of one token, its rank, and the best tokens."""

    logprob: float
    rank: int
    best_ids: tuple[int, ...]
    best_logprobs: tuple[float, ...]


@dataclass
class Request:
    """What a slot holds."""

    prompt: list[int]
    sampling: NewSlot
    num_computed: int = 0
    pages: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    prompt_records: list[Record] = field(default_factory=list)

    @property
    def num_left(self) -> int:
        """Prompt tokens not yet computed."""
        return max(0, len(self.prompt) - self.num_computed)


class Stepper:
    """The requests of one rank; every step goes through ``compute``."""

    def __init__(
        self, compute: Callable[[Plan], StepResult], page_size: int, num_pages: int, first_step: int = 1
    ) -> None:
        self.requests: dict[int, Request] = {}
        self.free_pages = list(range(num_pages))
        self.last_plan: Plan | None = None
        self._compute = compute
        self._page_size = page_size
        self._next_step = first_step
        self._new: list[NewSlot] = []
        self._appended: list[int] = []
        self._freed: list[int] = []
        self._saved: list[int] = []
        self._restored: list[int] = []

    def admit(
        self,
        prompt: Sequence[int],
        *,
        slot: int | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        next_output: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
    ) -> int:
        """A request in the lowest free slot, or in ``slot``; it gets rows by ``step``."""
        if slot is None:
            slot = next(slot for slot in range(1 << 20) if slot not in self.requests)
        new = NewSlot(slot, next_output, temperature, top_k, top_p, min_p, seed, logprobs, prompt_logprobs)
        self.requests[slot] = Request(list(prompt), new)
        self._new.append(new)
        return slot

    def adopt(self, slot: int, other: int, num_tokens: int) -> None:
        """Share the other slot's pages of the first ``num_tokens``, behind those that ``slot`` has computed."""
        request = self.requests[slot]
        for page in self.requests[other].pages[len(request.pages) : num_tokens // self._page_size]:
            request.pages.append(page)
            self._appended += [slot, page]
        request.num_computed = num_tokens

    def save(self, slot: int, position: int, snapshot: int) -> None:
        """Keep the slot's state before this position; the next step's row computes the token before it."""
        self._saved += [slot, position, snapshot]

    def restore(self, slot: int, snapshot: int) -> None:
        """The next step begins with the snapshot in the slot, which is new."""
        self._restored += [slot, snapshot]

    def free(self, slot: int) -> Request:
        """End the slot's request with the next step; its pages are free at once."""
        request = self.requests.pop(slot)
        self.free_pages = request.pages + self.free_pages
        self._freed.append(slot)
        return request

    def step(self, prefill: Mapping[int, int] | None = None, decode: Sequence[int] = ()) -> Plan:
        """One step: so many prompt tokens of each prefill slot, one token of each decode slot."""
        chunks = [(slot, self.requests[slot], length) for slot, length in (prefill or {}).items()]
        decoding = [(slot, self.requests[slot]) for slot in decode]
        rows: list[int] = []
        token_ids: list[int] = []
        for slot, request, length in chunks:
            is_last = length == request.num_left
            lookahead = int(not is_last and request.sampling.prompt_logprobs is not None)
            begin = request.num_computed
            rows += [slot, begin, length, is_last * IS_LAST_CHUNK + lookahead * LOOKAHEAD]
            token_ids += request.prompt[begin : begin + length + lookahead]
            self._lease(slot, begin + length)
        for slot, request in decoding:
            rows += [slot, request.num_computed]
            self._lease(slot, request.num_computed + 1)
        plan = self._plan(len(chunks), len(decoding), rows, token_ids)
        result = self._compute(plan)
        assert result.step == plan.step
        self._take(result, chunks, [request for _, request in decoding])
        return plan

    def generate(self, slot: int, num_tokens: int, chunk: int) -> list[int]:
        """The slot's output after so many tokens, its prompt computed in chunks, alone in every step."""
        request = self.requests[slot]
        while request.num_left > 0:
            self.step(prefill={slot: min(chunk, request.num_left)})
        while len(request.output) < num_tokens:
            self.step(decode=[slot])
        return request.output

    def _lease(self, slot: int, num_tokens: int) -> None:
        pages = self.requests[slot].pages
        while len(pages) * self._page_size < num_tokens:
            pages.append(self.free_pages.pop(0))
            self._appended += [slot, pages[-1]]

    def _plan(self, num_prefill: int, num_decode: int, rows: list[int], token_ids: list[int]) -> Plan:
        plan = Plan(
            step=self._next_step,
            num_prefill=num_prefill,
            num_decode=num_decode,
            new_slots=tuple(self._new),
            decision=None,
            rows=words(rows),
            token_ids=words(token_ids),
            appended_pages=words(self._appended),
            freed_slots=words(self._freed),
            restored_slots=words(self._restored),
            saved_slots=words(self._saved),
        )
        self._saved, self._restored = [], []
        self._next_step += 1
        self._new, self._appended, self._freed = [], [], []
        self.last_plan = plan
        return plan

    def _take(self, result: StepResult, chunks: list[tuple[int, Request, int]], decoding: list[Request]) -> None:
        prompt_records = bytes(result.prompt_logprobs)
        for _, request, length in chunks:
            num_records = min(length, request.num_left - 1)
            if (num_best := request.sampling.prompt_logprobs) is not None:
                records, prompt_records = read_records(prompt_records, num_records, num_best)
                request.prompt_records += records
            request.num_computed += length
        sampled = [request for _, request, _ in chunks if request.num_left == 0] + decoding
        for request in decoding:
            request.num_computed += 1
        assert np.frombuffer(result.num_accepted, dtype="<u4").tolist() == [1] * len(sampled)
        records_left = bytes(result.logprobs)
        for request, token in zip(sampled, np.frombuffer(result.token_ids, dtype="<u4").tolist(), strict=True):
            request.output.append(token)
            if (num_best := request.sampling.logprobs) is not None:
                records, records_left = read_records(records_left, 1, num_best)
                request.records += records
        assert not prompt_records
        assert not records_left


def words(values: Sequence[int]) -> bytes:
    return np.array(values, dtype="<u4").tobytes()


def read_records(frame: bytes, num_records: int, num_best: int) -> tuple[list[Record], bytes]:
    """The first records of a log-probability frame, and what follows them."""
    layout = struct.Struct(f"<fI{num_best}I{num_best}f")
    records = []
    for index in range(num_records):
        logprob, rank, *best = layout.unpack_from(frame, index * layout.size)
        records.append(Record(logprob, rank, tuple(best[:num_best]), tuple(best[num_best:])))
    return records, frame[num_records * layout.size :]
