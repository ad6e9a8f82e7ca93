"""The scheduler's rules in plain Python: what `plait-core` must plan, call by call, said as briefly as possible.

Everything is looked up by a scan, nothing is counted or indexed twice. Left out, because the core's own properties
cover them: draft tokens, several cache kinds, prompt log-probabilities, the step-time model and what depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from plait.settings import PageSettings, SchedulerSettings

from plait_testing.fair_share_model import FairShare
from plait_testing.page_model import Pages

MIN_CHUNK = 16
"""A chunk is not cut shorter than this for lack of tokens."""
QUEUE_PARTS = 1 << 16
"""Loads of lanes count in so many parts, so that they can be divided by weights."""


class Phase(Enum):
    WAITING = "waiting"
    PREEMPTED = "preempted"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FULLY_PLANNED = "fully planned"
    HELD = "held"
    FINISHED = "finished"


@dataclass(frozen=True)
class Ask:
    """What a client asks for."""

    prompt: tuple[int, ...]
    max_tokens: int
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: int = 0
    weight: int = 1
    salt: int = 0


@dataclass(frozen=True)
class Settings:
    scheduler: SchedulerSettings
    pages: PageSettings
    num_pages: int
    max_model_len: int
    max_rows: int

    @property
    def pool_tokens(self) -> int:
        return self.num_pages * self.pages.page_size

    @property
    def max_batch_tokens(self) -> int:
        assert self.scheduler.max_batch_tokens is not None
        return self.scheduler.max_batch_tokens

    @property
    def max_chunk(self) -> int:
        return self.scheduler.long_prefill_token_threshold or self.max_batch_tokens


@dataclass(eq=False)
class Request:
    """A request from its submission to its end."""

    id: int
    ask: Ask
    num_due: int
    """Output tokens after which it ends."""
    admitted_at: float = inf
    """Fair share: its tenant's virtual time at its first admission."""
    phase: Phase = Phase.WAITING
    output: list[int] = field(default_factory=list)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_published: int = 0
    num_planned: int = 0
    num_computed: int = 0
    last_step: int = 0
    num_rows_in_flight: int = 0
    num_samples_in_flight: int = 0

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return (*self.ask.prompt, *self.output)

    @property
    def num_prompt(self) -> int:
        return len(self.ask.prompt)

    @property
    def num_known(self) -> int:
        return self.num_prompt + len(self.output)

    @property
    def num_to_prefill(self) -> int:
        return self.num_known - self.num_planned

    @property
    def num_left(self) -> int:
        """Output tokens that are due and not in flight."""
        return self.num_due - len(self.output) - self.num_samples_in_flight

    def key(self, page: int, page_size: int) -> tuple[int, ...]:
        """By which the prefix cache finds a page: the salt, and every token up to the page's end."""
        return (self.ask.salt, *self.known[: (page + 1) * page_size])


@dataclass
class Row:
    request: Request
    start: int
    length: int
    samples: bool
    is_prefill: bool


@dataclass
class Plan:
    step: int
    prefill: list[Row]
    decode: list[Row]
    new_slots: list[tuple[int, int, int, int]]
    """Slot, request, index of its next output token, cached tokens."""
    freed_slots: list[int]
    appended_pages: list[tuple[int, int]]


@dataclass
class InFlight:
    step: int
    rows: list[Row]
    parked: list[Request] = field(default_factory=list)
    """Ended while this step, their last, still used their pages."""


class Scheduler:
    """The three verbs."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = Pages(settings.num_pages)
        self.requests: list[Request] = []
        self.free_slots = list(reversed(range(settings.scheduler.max_seqs or 0)))
        self.decoders: list[Request] = []
        """In the order of their turns."""
        self.in_flight: list[InFlight] = []
        self.last_step = 0
        self.freed_slots: list[int] = []
        self.is_fair = settings.scheduler.policy == "fair"
        self.fair_share = FairShare()
        self.lane_weights: dict[int, int] = {}
        """Of each tenant, that of its request which was queued last."""
        self.rejected: list[int] = []
        """Left the queue unserved since the caller last asked."""
        self._begin_plan()

    # Who is where.

    def order(self, request: Request) -> tuple[float, ...]:
        """The order of admission, of prefills and, from its end, of preemption."""
        priority = 0 if self.settings.scheduler.policy == "fcfs" else request.ask.priority
        return (request.admitted_at, priority, request.id)

    def head(self) -> Request | None:
        """Who is admitted next: the first in order, under fair share of the tenant whose virtual time is least."""
        queued = self.queued()
        if self.is_fair and queued:
            time = {it.ask.tenant: self.fair_share.present[it.ask.tenant].time for it in queued}
            queued.sort(key=lambda it: (time[it.ask.tenant], self.order(it), it.ask.tenant))
        head = queued[0] if queued else None
        if self.is_fair:
            self.fair_share.catch_up(time[head.ask.tenant] if head else None)
        return head

    def queued(self) -> list[Request]:
        return self._in_phase(Phase.WAITING, Phase.PREEMPTED)

    def running(self) -> list[Request]:
        return self._in_phase(Phase.PREFILLING, Phase.DECODING, Phase.FULLY_PLANNED, Phase.HELD)

    def prefills(self) -> list[Request]:
        return self._in_phase(Phase.PREFILLING)

    def held(self) -> list[Request]:
        return self._in_phase(Phase.HELD)

    def _in_phase(self, *phases: Phase) -> list[Request]:
        return sorted((it for it in self.requests if it.phase in phases), key=self.order)

    def is_idle(self) -> bool:
        return not (self.in_flight or self.queued() or self.running())

    # Submit: rule 0.

    def submit(self, ask: Ask) -> int | str:
        """The request's number, or why it is refused."""
        in_model = self.settings.max_model_len - len(ask.prompt)
        in_pool = self.settings.pool_tokens - len(ask.prompt)
        if in_model < 1:
            return "TooLongForModel"
        if in_pool < 1:
            return "TooLongForPool"
        displaced = self._displaced_by(ask)
        if isinstance(displaced, str):
            return displaced
        for other in displaced:
            self.rejected.append(other.id)
            self.end(other.id, "Displaced")
        request = Request(len(self.requests), ask, min(ask.max_tokens, in_model, in_pool))
        if self.is_fair:
            self.fair_share.enter(ask.tenant, ask.weight)
        self._start_waiting(request)
        self.requests.append(request)
        return request.id

    def _start_waiting(self, request: Request) -> None:
        """Called before the request is in the queue."""
        tenant = request.ask.tenant
        self.lane_weights[tenant] = request.ask.weight
        if self.is_fair and all(it.ask.tenant != tenant for it in self.queued()):
            self.head()
            self.fair_share.start_waiting(tenant)

    def _displaced_by(self, ask: Ask) -> list[Request] | str:
        """Who must leave a full queue for a newcomer: nobody if it has room, a refusal if nobody has to."""
        queued, limits = self.queued(), self.settings.scheduler
        num_over = len(queued) + 1 - limits.max_queue
        num_tokens_over = sum(it.num_prompt for it in queued) + len(ask.prompt) - limits.max_queue_tokens
        if not queued or (num_over <= 0 and num_tokens_over <= 0):
            return []
        refusal = "QueueFull" if num_over > 0 else "QueueTokensFull"
        if not self.is_fair:
            return refusal

        def share(requests: list[Request], more: Ask | None = None) -> int:
            """A lane's share of the limit that is exceeded."""
            load = len(requests) if num_over > 0 else sum(it.num_prompt for it in requests)
            if more is not None:
                return (load + (1 if num_over > 0 else len(more.prompt))) * QUEUE_PARTS // more.weight
            return load * QUEUE_PARTS // self.lane_weights[requests[0].ask.tenant] if requests else 0

        lanes = {it.ask.tenant: [other for other in queued if other.ask.tenant == it.ask.tenant] for it in queued}
        longest = max(lanes, key=lambda tenant: (share(lanes[tenant]), tenant))
        if longest == ask.tenant:
            return refusal
        left, displaced = list(lanes[longest]), list[Request]()
        while left and left[-1].phase is Phase.WAITING:
            displaced.append(left.pop())
            if share(left) < share(lanes.get(ask.tenant, []), ask):
                return refusal
            if len(displaced) >= num_over and sum(it.num_prompt for it in displaced) >= num_tokens_over:
                return displaced
        return refusal

    # Plan: rules 1 to 5.

    def _begin_plan(self) -> None:
        self.rows: list[Row] = []
        self.new_slots: list[tuple[int, int, int, int]] = []
        self.appended: list[tuple[int, int]] = []
        self.step = self.last_step + 1

    @property
    def num_tokens_left(self) -> int:
        return self.settings.max_batch_tokens - sum(row.length for row in self.rows)

    @property
    def num_rows_left(self) -> int:
        return self.settings.max_rows - len(self.rows)

    def plan(self) -> Plan | None:
        self._begin_plan()
        if self.settings.scheduler.mixed:
            self._grant()
            self._decode()
            self._resume()
            self._admit()
        else:
            self._resume()
            self._admit()
            if not self.rows:
                self._decode()
        return self._launch() if self.rows else None

    def _grant(self) -> None:
        """Rule 1: the oldest prefill, if it had no row for too long, goes first with a page at most."""
        for request in self.prefills()[:1]:
            if self.step - request.last_step > self.settings.scheduler.prefill_starvation_steps:
                most = min(self.settings.pages.page_size, self.settings.max_chunk, self.settings.max_batch_tokens)
                self._prefill_row(request, min(request.num_to_prefill, most))

    def _decode(self) -> None:
        """Rule 2: a row for every decoder in turn. Who gets one goes to the tail; others keep their place."""
        passed: list[Request] = []
        while True:
            num_passed = sum(it in self.decoders for it in passed)
            request = next(iter(self.decoders[num_passed:]), None)
            if request is None or request.last_step == self.step:
                return
            if not (self.num_tokens_left and self.num_rows_left):
                return
            if self._lease(request, request.num_planned + 1):
                self._add_row(Row(request, request.num_planned, 1, samples=True, is_prefill=False))
            else:
                passed.append(request)

    def _resume(self) -> None:
        """Rule 3: prefills under way, in order."""
        for request in self.prefills():
            if request.phase is not Phase.PREFILLING:
                continue
            if not (self.num_tokens_left and self.num_rows_left):
                return
            length = self._chunk_length(request.num_to_prefill)
            if request.last_step != self.step and length and not self._prefill_row(request, length):
                return

    def _chunk_length(self, remaining: int) -> int:
        """Tokens that a chunk may take now; 0 where it would be too short."""
        most = min(remaining, self.settings.max_chunk)
        least = min(most, MIN_CHUNK, self.settings.max_batch_tokens)
        length = min(most, self.num_tokens_left)
        return length if length >= least and self.num_rows_left else 0

    def _admit(self) -> None:
        """Rule 4: waiting requests, strictly in order."""
        while self.free_slots and not self.held() and self.num_tokens_left and self.num_rows_left:
            request = self.head()
            if request is None:
                return
            hits = self._find(request)
            num_cached = len(hits) * self.settings.pages.page_size
            length = self._chunk_length(request.num_known - num_cached)
            if not length or not self._has_pages(request, hits):
                return
            self._take_slot(request, hits, num_cached)
            assert self._prefill_row(request, length)

    def _find(self, request: Request) -> list[int]:
        """Its leading pages that the cache has. The last token is always computed."""
        if not self.settings.pages.prefix_cache:
            return []
        size = self.settings.pages.page_size
        return self.pool.find([request.key(page, size) for page in range((request.num_known - 1) // size)])

    def _has_pages(self, request: Request, hits: list[int]) -> bool:
        """Room for the whole prompt, beside what prefills under way need and, if anyone runs, the watermark."""
        num_new = self._num_pages(request.num_known) - len(hits)
        reserved = sum(self._num_pages(it.num_known) - len(it.pages) for it in self.prefills())
        watermark = (self.settings.pages.watermark or 0) if self.running() else 0
        available = self.pool.num_available() - sum(not self.pool.is_held(page) for page in hits)
        return num_new + reserved + watermark <= available

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.settings.pages.page_size)

    def _take_slot(self, request: Request, hits: list[int], num_cached: int) -> None:
        if self.is_fair:
            request.admitted_at = min(request.admitted_at, self.fair_share.present[request.ask.tenant].time)
        self._charge(request, request.num_known - num_cached)
        request.slot = self.free_slots.pop()
        request.phase = Phase.PREFILLING
        request.pages = list(hits)
        self.pool.lease(hits)
        request.num_published = len(hits)
        request.num_planned = request.num_computed = num_cached
        request.last_step = self.step
        self.new_slots.append((request.slot, request.id, len(request.output), num_cached))
        self.appended += [(request.slot, page) for page in hits]

    def _charge(self, request: Request, num_tokens: int) -> None:
        """A prefill is charged whole at admission; its rows would pay for pages, had steps been measured."""
        if self.is_fair:
            self.fair_share.charge(request.ask.tenant, num_tokens)

    def _prefill_row(self, request: Request, length: int) -> bool:
        end = request.num_planned + length
        has_pages = self._lease(request, end)
        if has_pages:
            samples = end == request.num_known
            self._add_row(Row(request, request.num_planned, length, samples, is_prefill=True))
        return has_pages

    def _add_row(self, row: Row) -> None:
        request = row.request
        self.rows.append(row)
        self._charge(request, 0 if row.is_prefill else 1)
        request.num_planned += row.length
        request.last_step = self.step
        request.num_rows_in_flight += 1
        request.num_samples_in_flight += row.samples
        if request in self.decoders:
            self.decoders.remove(request)
        if not row.samples:
            request.phase = Phase.PREFILLING
        elif request.num_left == 0:
            request.phase = Phase.FULLY_PLANNED
        else:
            request.phase = Phase.DECODING
            self.decoders.append(request)

    def _launch(self) -> Plan:
        prefill = [row for row in self.rows if row.is_prefill]
        decode = [row for row in self.rows if not row.is_prefill]
        for rows in (prefill, decode):
            rows.sort(key=lambda row: self.order(row.request))
        self.last_step = self.step
        self.in_flight.append(InFlight(self.step, [*prefill, *decode]))
        plan = Plan(self.step, prefill, decode, self.new_slots, self.freed_slots, self.appended)
        self.freed_slots = []
        return plan

    # Pages: who gives way.

    def _lease(self, request: Request, num_tokens: int) -> bool:
        """Leases what the request lacks for so many tokens. If false, its row must wait."""
        num = self._num_pages(num_tokens) - len(request.pages)
        while self.pool.num_available() < num:
            promised = self.pool.num_parked() + sum(len(it.pages) for it in self.held())
            if self.pool.num_available() + promised >= num:
                return False
            after = [it for it in self.running() if self.order(it) > self.order(request)]
            with_row = {row.request.id for row in self.rows}
            victims = [it for it in after if it.phase is not Phase.HELD and it.id not in with_row]
            if not victims:
                if not any(self.order(row.request) > self.order(request) for row in self.rows):
                    self._preempt_or_hold(request)
                return False
            self._preempt_or_hold(victims[-1])
        taken = [self.pool.take() for _ in range(num)]
        request.pages += taken
        self.appended += [(request.slot, page) for page in taken]
        return True

    def _preempt_or_hold(self, request: Request) -> None:
        if request in self.decoders:
            self.decoders.remove(request)
        if request.num_rows_in_flight:
            request.phase = Phase.HELD
        else:
            self._preempt(request)

    def _preempt(self, request: Request) -> None:
        self._free(request)
        request.phase = Phase.FINISHED
        self._start_waiting(request)
        request.phase = Phase.PREEMPTED

    def _free(self, request: Request) -> None:
        """Releases pages and slot at once."""
        self.pool.release(request.pages)
        request.pages = []
        self.free_slots.append(request.slot)
        self.freed_slots.append(request.slot)

    # Advance.

    def complete(self, tokens: list[int]) -> list[tuple[int, int | str]]:
        """The oldest step's result: a token for each sampled row. Returns tokens and ends, in order."""
        step = self.in_flight.pop(0)
        told: list[tuple[int, int | str]] = []
        for row in step.rows:
            if not row.samples:
                self._complete_chunk(row)
        for row, token in zip([row for row in step.rows if row.samples], tokens, strict=True):
            told += self._complete_sample(row, token)
        for request in step.parked:
            self.pool.unpark(request.pages)
            self.free_slots.append(request.slot)
        return told

    def _complete_chunk(self, row: Row) -> None:
        request = row.request
        if request.phase is Phase.FINISHED:
            return
        request.num_rows_in_flight -= 1
        request.num_computed = row.start + row.length
        self._publish(request)
        self._preempt_if_due(request)

    def _complete_sample(self, row: Row, token: int) -> list[tuple[int, int | str]]:
        request = row.request
        if request.phase is Phase.FINISHED:
            return []
        request.num_rows_in_flight -= 1
        request.num_samples_in_flight -= 1
        request.output.append(token)
        request.num_computed = request.num_known - 1
        self._publish(request)
        if token in request.ask.stop_ids:
            return [(request.id, token), *self.end(request.id, "Stop")]
        if len(request.output) == request.num_due:
            return [(request.id, token), *self.end(request.id, "Length")]
        self._preempt_if_due(request)
        return [(request.id, token)]

    def _publish(self, request: Request) -> None:
        """Full pages of computed, final tokens can be found by later prompts."""
        size = self.settings.pages.page_size
        while self.settings.pages.prefix_cache and (request.num_published + 1) * size <= request.num_computed:
            page = request.num_published
            self.pool.publish(request.pages[page], request.key(page, size))
            request.num_published += 1

    def _preempt_if_due(self, request: Request) -> None:
        if request.phase is Phase.HELD and not request.num_rows_in_flight:
            self._preempt(request)

    def end(self, number: int, reason: str) -> list[tuple[int, int | str]]:
        """Ends a request wherever it is; nothing if it has ended."""
        request = self.requests[number]
        if request.phase is Phase.FINISHED:
            return []
        if self.is_fair:
            self.fair_share.leave(request.ask.tenant)
        if request.phase not in (Phase.WAITING, Phase.PREEMPTED):
            self._leave(request)
        request.phase = Phase.FINISHED
        return [(number, reason)]

    def _leave(self, request: Request) -> None:
        """Frees what it holds, with its last step in flight if there is one."""
        if request in self.decoders:
            self.decoders.remove(request)
        if not request.num_rows_in_flight:
            return self._free(request)
        self.freed_slots.append(request.slot)
        self.pool.park(request.pages)
        next(step for step in self.in_flight if step.step == request.last_step).parked.append(request)
        return None
