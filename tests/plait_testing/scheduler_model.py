"""The scheduler's rules in plain Python: what `plait-core` must plan, call by call, said as briefly as possible.

Everything is looked up by a scan, nothing is counted or indexed twice. Left out, because the core's own properties
cover them: draft tokens, several cache kinds, prompt log-probabilities, the step-time model and what depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from plait_testing import late_mask_model
from plait_testing.fair_share_model import FairShare
from plait_testing.outlook_model import Forecast, Growth, Outlook, latest_end
from plait_testing.page_model import Key, Pages
from plait_testing.queue_limits_model import displaced_by
from plait_testing.scheduler_state import Ask, InFlight, Phase, Plan, Request, Row, Settings, num_prompts

MIN_CHUNK = 16
"""A chunk is not cut shorter than this for lack of tokens."""
MAX_PASSED = 64
"""Requests that may be passed in one plan."""
WINDOW, MAX_OVERTAKEN = 64, 256
"""Cache-aware: requests that a plan compares, and later ones that may be admitted before one."""
NUM_LOOKED_AT = 4
"""Requests behind a blocked head that a plan looks at."""
SPACING = 1.03
"""Distance of two ends, as a multiple of what fills the pool evenly."""


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
        self.lane_times: dict[int, int] = {}
        """The virtual time of each tenant with waiting requests when it was last looked at."""
        self.lane_weights: dict[int, int] = {}
        """Of each tenant, that of its request which was queued last."""
        self.outlook = Outlook()
        """The head that others were admitted before for lack of its pages, and how many."""
        self.now = 0
        self.rejected: list[int] = []
        """Left the queue unserved since the caller last asked."""
        self._begin_plan()

    # Who is where.

    def order(self, request: Request) -> tuple[float, ...]:
        """The order of admission, of prefills and, from its end, of preemption."""
        return (request.admitted_at, request.due, request.id)

    def head(self) -> Request | None:
        """Who is admitted next: the first in order, under fair share of the tenant whose virtual time is least."""
        if not self.is_fair:
            return next(iter(self.queued()), None)
        while lanes := self._lanes():
            tenant = lanes[0][0].ask.tenant
            time = self.fair_share.present[tenant].time
            if time == self.lane_times[tenant]:
                self.fair_share.catch_up(time)
                return lanes[0][0]
            self.lane_times[tenant] = time
        self.fair_share.catch_up(None)
        return None

    def _lanes(self) -> list[list[Request]]:
        """Each tenant's requests in order; tenants by the virtual time that they had when last looked at."""
        if not self.is_fair:
            return [self.queued()]
        lanes: dict[int, list[Request]] = {}
        for request in self.queued():
            lanes.setdefault(request.ask.tenant, []).append(request)
        return sorted(
            lanes.values(), key=lambda it: (self.lane_times[it[0].ask.tenant], self.order(it[0]), it[0].ask.tenant)
        )

    def queued(self) -> list[Request]:
        return self._in_phase(Phase.WAITING, Phase.PREEMPTED)

    def running(self) -> list[Request]:
        return self._in_phase(Phase.PREFILLING, Phase.DECODING, Phase.FULLY_PLANNED, Phase.HELD, Phase.AWAITING_MASK)

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
        """The number of its first choice, or why it is refused."""
        in_model = self.settings.max_model_len - len(ask.prompt)
        in_pool = self.settings.pool_tokens - len(ask.prompt)
        least = min(1, ask.max_tokens)
        if in_model < least:
            return "TooLongForModel"
        if in_pool < least:
            return "TooLongForPool"
        displaced = displaced_by(
            self.queued(), ask, self.settings.scheduler, self.lane_weights if self.is_fair else None
        )
        if isinstance(displaced, str):
            return displaced
        for other in displaced:
            self.rejected.append(other.id)
            self.end(other.id, "Displaced")
        first = len(self.requests)
        for _ in range(ask.num_choices):
            self._enqueue(first, ask, min(ask.max_tokens, in_model, in_pool))
        return first

    def _enqueue(self, first_choice: int, ask: Ask, num_due: int) -> None:
        """Each choice of a prompt is a request."""
        num_shareable, salt = inf, ask.salt
        if not self.settings.pages.prefix_cache:
            num_shareable, salt = (0, len(ask.prompt))[ask.num_choices > 1], first_choice
        request = Request(len(self.requests), ask, num_due, first_choice, num_shareable, salt, since=self.now)
        if self.settings.scheduler.policy in ("priority", "fair"):
            request.due = self.now + self.settings.aging * ask.priority
        if self.is_fair:
            self.fair_share.enter(ask.tenant, ask.weight)
        self._start_waiting(request)
        self.requests.append(request)

    def _start_waiting(self, request: Request) -> None:
        """Called before the request is in the queue."""
        tenant = request.ask.tenant
        self.lane_weights[tenant] = request.ask.weight
        if self.is_fair and all(it.ask.tenant != tenant for it in self.queued()):
            self.head()
            self.fair_share.start_waiting(tenant)
            self.lane_times[tenant] = 0

    # Plan: rules 1 to 5.

    def _begin_plan(self) -> None:
        self.rows: list[Row] = []
        self.new_slots: list[tuple[int, int, int, int]] = []
        self.appended: list[tuple[int, int]] = []
        self.forecast: Forecast | None = None
        self.computing: set[Key] = set()
        """Keys of the pages in which this plan's prefill rows begin."""
        self.step = self.last_step + 1

    @property
    def num_tokens_left(self) -> int:
        return self.settings.max_batch_tokens - sum(row.length for row in self.rows)

    @property
    def num_rows_left(self) -> int:
        return self.settings.max_rows - len(self.rows)

    def plan(self) -> Plan | None:
        self._expire()
        self._begin_plan()
        self._make_way()
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

    def _expire(self) -> None:
        """Requests that have waited too long without running leave the queue, oldest first."""
        limit = self.settings.scheduler.max_queue_seconds
        for request in self.requests if limit is not None else []:
            if request.is_unserved and limit is not None:
                if self.now - request.since <= round(limit * 1e6):
                    return
                self.rejected.append(request.id)
                self.end(request.id, "Expired")

    def _make_way(self) -> None:
        """Requests of a priority worse by the threshold are preempted, last in order first, if that admits the head."""
        if self.settings.scheduler.priority_preemption_threshold is None or self.held():
            return
        head = self.head()
        if head is None:
            return
        hits, victims = self._find(head), list[Request]()
        running = self.running()
        while not (self._has_pages(head, hits, [], victims) and (self.free_slots or victims)):
            victim = running.pop() if running else None
            if victim is None or not self._outranks(head, victim):
                return
            victims.append(victim)
        for victim in victims:
            self._preempt_or_hold(victim)

    def _outranks(self, waiting: Request, running: Request) -> bool:
        threshold = self.settings.scheduler.priority_preemption_threshold
        difference = running.ask.priority - waiting.ask.priority
        return self.order(running) > self.order(waiting) and threshold is not None and difference >= threshold

    def _grant(self) -> None:
        """Rule 1: the oldest prefill, if it had no row for too long, goes first with a page at most."""
        for request in self.prefills()[:1]:
            if self.step - request.last_step > self.settings.scheduler.prefill_starvation_steps:
                most = min(self.settings.page_size, self.settings.max_chunk, self.settings.max_batch_tokens)
                self._prefill_row(request, request.num_planned, min(request.num_to_prefill, most))

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
            start, length = self._next_chunk(request) if request.last_step != self.step else (0, 0)
            if length and not self._prefill_row(request, start, length):
                return

    def _next_chunk(self, request: Request) -> tuple[int, int]:
        """Where a prefill goes on, behind pages that others have published, and how many tokens it may take."""
        size, planned = self.settings.page_size, request.num_planned
        start, remaining = planned, request.num_to_prefill
        if request.num_shareable:
            if self._waits_for_row(request, planned):
                return planned, 0
            page = planned // size
            if planned % size == 0:
                start += size * len(self._find(request, page))
                remaining -= start - planned
            elif self._find(request, page + 1):
                remaining = min(remaining, (page + 1) * size - planned)
        return start, self._chunk_length(remaining)

    def _waits_for_row(self, request: Request, num_tokens: int) -> bool:
        """Whether a row of this plan computes the page that the request needs next."""
        if not self.computing:
            return False
        size = self.settings.page_size
        request.num_found = max(request.num_found, num_tokens - num_tokens % size)
        request.num_found += size * len(self._find(request, request.num_found // size))
        end = request.num_found - request.num_found % size + size
        return end <= self._num_cacheable(request) and request.key(end // size - 1, size) in self.computing

    def _chunk_length(self, remaining: int) -> int:
        """Tokens that a chunk may take now; 0 where it would be too short."""
        most = min(remaining, self.settings.max_chunk)
        least = min(most, MIN_CHUNK, self.settings.max_batch_tokens)
        length = min(most, self.num_tokens_left)
        return length if length >= least and self.num_rows_left else 0

    def _admit(self) -> None:
        """Rule 4: waiting requests in order. Those that wait for rows of this plan may be passed."""
        passed: list[Request] = []
        ranked: Iterator[Request] | None = None
        while len(passed) < len(self.free_slots) and num_prompts(passed) < MAX_PASSED and not self.held():
            if not (self.num_tokens_left and self.num_rows_left):
                return
            if self.settings.scheduler.policy == "cache-aware":
                ranked = iter(self._ranked()) if ranked is None else ranked
                request = next(ranked, None)
            else:
                request = self._behind(passed[-1]) if passed else self.head()
            if request is None:
                return
            if self._is_passed(request):
                passed.append(request)
            elif not self._admit_now(request, passed):
                return

    def _ranked(self) -> list[Request]:
        """Of those that waited longest, who has most in the cache. Preempted and often overtaken ones go first."""
        queued = self.queued()
        num_left_queue = len(self.requests) - len(queued)
        for request in queued[:WINDOW]:
            size = self.settings.page_size
            while request.num_found and not self._find(request, request.num_found // size - 1):
                request.num_found -= size
            request.num_found += size * len(self._find(request, request.num_found // size))

        def rank(request: Request) -> tuple[bool, int]:
            goes_first = request.phase is Phase.PREEMPTED or num_left_queue >= request.id + MAX_OVERTAKEN
            return (not goes_first, -request.num_found)

        return sorted(queued[:WINDOW], key=rank)

    def _behind(self, request: Request) -> Request | None:
        """The next request of the lane, or the first of the next lane."""
        lanes = self._lanes()
        lane = next(it for it in lanes if request in it)
        behind = [*lane[lane.index(request) + 1 :], *(it[0] for it in lanes[lanes.index(lane) + 1 :])]
        return behind[0] if behind else None

    def _is_passed(self, request: Request) -> bool:
        if not (request.num_shareable and self.computing):
            return False
        if not request.num_found:
            request.num_found = self.settings.page_size * len(self._find(request))
        return self._waits_for_row(request, 0)

    def _admit_now(self, request: Request, passed: list[Request]) -> bool:
        """Admits the request, or if its pages are not free one of the next."""
        hits, length = self._look_up(request)
        if not length:
            return False
        if not self._has_pages(request, hits, passed):
            return self._skip_ahead(request, passed)
        if not self._can_grow(request, len(hits)):
            return False
        self._enter(request, hits, length)
        return True

    def _look_up(self, request: Request) -> tuple[list[int], int]:
        """What it finds in the cache, and the tokens of its first chunk."""
        hits = self._find(request)
        request.num_found = len(hits) * self.settings.page_size
        return hits, self._chunk_length(request.num_known - request.num_found)

    def _skip_ahead(self, head: Request, passed: list[Request]) -> bool:
        """Admits the first of the next requests whose pages are free; so many at most before each head."""
        if head.phase is not Phase.WAITING or head.num_overtaken >= self.settings.scheduler.max_skip_ahead:
            return False
        if self.settings.scheduler.policy == "cache-aware":
            return False
        request: Request | None = head
        for _ in range(NUM_LOOKED_AT):
            request = self._behind(request) if request is not None else None
            if request is None:
                return False
            if request.phase is not Phase.WAITING or not self._has_pages(request, [], passed):
                continue
            if self._is_passed(request):
                continue
            hits, length = self._look_up(request)
            if not length:
                return False
            fits = self._can_grow(request, len(hits))
            head.num_overtaken += fits
            if fits:
                self._enter(request, hits, length)
            return fits
        return False

    def _enter(self, request: Request, hits: list[int], length: int) -> None:
        num_cached = request.num_found
        self._note_admission(request, hits)
        self._take_slot(request, hits, num_cached)
        assert self._prefill_row(request, num_cached, length)

    # Whether answers are expected to find pages to their ends.

    def _can_grow(self, head: Request, num_hits: int) -> bool:
        """Nothing is expected where the user gave a watermark."""
        running = self.running()
        if self.settings.pages.watermark is not None or not running or self._outranks(head, running[-1]):
            return True
        if self.outlook.blocked is not None:
            blocked, until = self.outlook.blocked
            if blocked == head.id and self.step < until:
                return False
        growth = self._growth_of(head)
        grows = self._has_room_for_all(head) or (self._is_spaced(growth) and self._fits_beside(growth))
        if not grows:
            self.outlook.blocked = (head.id, self.step + 1 + len(running) // 64)
        return grows

    def _has_room_for_all(self, head: Request) -> bool:
        """Whether the pool holds everything that runs, or soon may, at its full length."""
        queued = self.queued()
        each = self.outlook.lengths.expected_left(0, head.num_due)
        waiting = sum(it.num_queue_tokens for it in queued) + len(queued) * each
        waiting *= min(1.0, len(self.free_slots) / max(1, len(queued)))
        expected = sum(it.num_expected for it in self.running()) + self._num_expected(head)
        return expected + waiting <= self._pool_less_reserve()

    def _num_expected(self, request: Request) -> int:
        left = self.outlook.lengths.expected_left(len(request.output), request.num_due)
        return request.num_known + int(left)

    def _pool_less_reserve(self) -> float:
        kept = self.settings.watermark * self.settings.page_size
        return self.settings.pool_tokens * (1.0 - self.outlook.reserve) - kept

    def _fits_beside(self, head: Growth) -> bool:
        if self.forecast is None:
            size, running = self.settings.page_size, self.running()
            num_alone = sum(max(0, len(it.pages) - it.num_shared // size) for it in running)
            num_leased = sum(self.pool.leases[page] > 0 for page in self.pool.leases)
            shared = float(max(0, num_leased - num_alone)) * size
            growths = [self._growth(it) for it in running]
            self.forecast = Forecast(growths, self._pool_less_reserve() - shared, self.outlook.lengths)
        return self.forecast.fits(head)

    def _growth(self, request: Request) -> Growth:
        num_held = max(request.num_planned, request.num_known)
        num_output = request.num_due - request.num_left
        return self._growth_from(max(0, num_held - request.num_shared), num_output, request.num_due)

    def _growth_of(self, head: Request) -> Growth:
        return self._growth_from(head.num_known - head.num_found, len(head.output), head.num_due)

    def _growth_from(self, num_alone: int, num_output: int, most: int) -> Growth:
        num_tokens = num_alone + self.settings.page_size / 2
        survival = self.outlook.lengths.survival(num_output)
        return Growth(num_output, latest_end(num_output, most), num_tokens, survival)

    def _is_spaced(self, head: Growth) -> bool:
        """Whether the head ends at another time than the one admitted before it."""
        if self.outlook.last_admitted is None:
            return True
        last, end = self.outlook.last_admitted
        is_uncertain = self.outlook.lengths.survival(head.latest_end) < head.survival / 2
        if is_uncertain or self.requests[last] not in self.running():
            return True
        left = float(head.num_left)
        token_steps = (head.num_tokens + left / 2) * left
        apart = abs(self.step + head.num_left - end)
        return apart >= SPACING * token_steps / self.settings.pool_tokens

    def _note_admission(self, request: Request, hits: list[int]) -> None:
        growth = self._growth_of(request)
        if self.forecast is not None:
            num_cached = sum(not self.pool.is_held(page) for page in hits)
            self.forecast.capacity -= num_cached * self.settings.page_size
            self.forecast.push(growth)
        self.outlook.last_admitted = (request.id, self.step + growth.num_left)
        request.num_expected = self._num_expected(request)

    def _find(self, request: Request, first: int = 0) -> list[int]:
        """Its pages from `first` on that others have filled."""
        size = self.settings.page_size
        return self.pool.find([request.key(page, size) for page in range(first, self._num_cacheable(request) // size)])

    def _num_cacheable(self, request: Request) -> int:
        """The last token is always computed."""
        return int(min(request.num_known - 1, request.num_shareable))

    def _has_pages(
        self, request: Request, hits: list[int], passed: list[Request], released: Sequence[Request] = ()
    ) -> bool:
        """Room for the whole prompt, beside what prefills, passed requests and, if anyone runs, the watermark need."""
        num_new = self._num_pages(request.num_known) - len(hits)
        reserved = sum(self._num_pages(it.num_known) - len(it.pages) for it in self.prefills())
        size = self.settings.page_size
        reserved += sum(
            self._num_pages(it.num_known) - max(it.num_found, it.num_from_siblings(size)) // size for it in passed
        )
        watermark = self.settings.watermark if self.running() else 0
        available = self.pool.num_available() - sum(not self.pool.is_held(page) for page in hits)
        return num_new + reserved + watermark <= available + self.pool.num_released((it.pages for it in released), hits)

    def _num_pages(self, num_tokens: int) -> int:
        return -(-num_tokens // self.settings.page_size)

    def _take_slot(self, request: Request, hits: list[int], num_cached: int) -> None:
        if self.is_fair:
            request.admitted_at = min(request.admitted_at, self.fair_share.present[request.ask.tenant].time)
        self._charge(request, request.num_known - num_cached)
        for choice in self.requests[request.first_choice :][: request.ask.num_choices]:
            choice.is_kept = True
        request.slot = self.free_slots.pop()
        request.phase = Phase.PREFILLING
        request.pages = list(hits)
        self.pool.lease(hits)
        request.num_published = len(hits)
        request.num_planned = request.num_computed = request.num_shared = num_cached
        request.has_sampled = False
        request.last_step = self.step
        self.new_slots.append((request.slot, request.id, len(request.output), num_cached))
        self.appended += [(request.slot, page) for page in hits]

    def _charge(self, request: Request, num_tokens: int) -> None:
        """A prefill is charged whole at admission; its rows would pay for pages, had steps been measured."""
        if self.is_fair:
            self.fair_share.charge(request.ask.tenant, num_tokens)

    def _prefill_row(self, request: Request, start: int, length: int) -> bool:
        length = self._shrink_to_free_pages(request, start, length)
        if not self._adopt(request, start, start + length) or not self._lease(request, start + length):
            return False
        page, size = start // self.settings.page_size, self.settings.page_size
        if (page + 1) * size <= min(request.num_known, request.num_shareable):
            self.computing.add(request.key(page, size))
        samples = request.num_due > 0 and start + length == request.num_known
        self._add_row(Row(request, start, length, samples, is_prefill=True))
        return True

    def _shrink_to_free_pages(self, request: Request, start: int, length: int) -> int:
        """The part of a chunk that needs no preemption; where no page is free, up to the end of one page."""
        num = self._num_pages(start + length) - len(request.pages)
        if start > request.num_planned or self.pool.num_available() >= num:
            return length
        size = self.settings.page_size
        in_free_pages = (len(request.pages) + self.pool.num_available()) * size
        return min(length, max(in_free_pages - start, size - start % size))

    def _adopt(self, request: Request, start: int, end: int) -> bool:
        """Leases the published pages before a chunk, if there is room for them and for the chunk."""
        first, size = request.num_planned // self.settings.page_size, self.settings.page_size
        if start == request.num_planned:
            return True
        while True:
            keys = [request.key(page, size) for page in range(first, start // size)]
            found = self.pool.find(keys)
            num = self._num_pages(end) - start // size + sum(not self.pool.is_held(page) for page in found)
            if self.pool.num_available() >= num:
                break
            if not self._free_pages_for(request, num):
                return False
        self.pool.lease(found)
        request.pages += found
        request.num_published = len(request.pages)
        request.num_shared += start - request.num_planned
        request.num_planned = start
        self.appended += [(request.slot, page) for page in found]
        return True

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
        if not row.samples and request.num_to_prefill:
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
        self.outlook.decay()
        for row in prefill:
            may_be_computed_again = row.samples and row.request.ask.is_masked
            self._publish(row.request, row.start + row.length - may_be_computed_again)
        plan = Plan(self.step, prefill, decode, self.new_slots, self.freed_slots, self.appended)
        self.freed_slots = []
        return plan

    # Pages: who gives way.

    def _lease(self, request: Request, num_tokens: int) -> bool:
        """Leases what the request lacks for so many tokens. If false, its row must wait."""
        num = self._num_pages(num_tokens) - len(request.pages)
        if not self._free_pages_for(request, num):
            return False
        taken = [self.pool.take() for _ in range(num)]
        request.pages += taken
        self.appended += [(request.slot, page) for page in taken]
        return True

    def _free_pages_for(self, request: Request, num: int) -> bool:
        """Preempts requests after the asker until so many pages are free, or results in flight will free them."""
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
            self.outlook.observe_preemption()
            self._preempt_or_hold(victims[-1])
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
        self.pool.release(request.pages, request.ask.tenant)
        request.pages = []
        self.free_slots.append(request.slot)
        self.freed_slots.append(request.slot)

    # Advance.

    def complete(self, tokens: list[int | None]) -> list[tuple[int, int | str]]:
        """The oldest step's result: a token for each sampled row that had its mask. Returns tokens and ends."""
        step = self.in_flight.pop(0)
        told: list[tuple[int, int | str]] = []
        for row in step.rows:
            if not row.samples:
                told += self._complete_chunk(row)
        for row, token in zip([row for row in step.rows if row.samples], tokens, strict=True):
            told += self._complete_sample(row, token)
        for request in step.parked:
            self.pool.unpark(request.pages, request.ask.tenant)
            self.free_slots.append(request.slot)
        return told

    def _complete_chunk(self, row: Row) -> list[tuple[int, int | str]]:
        request = row.request
        if request.phase is Phase.FINISHED:
            return []
        request.num_rows_in_flight -= 1
        request.num_computed = row.start + row.length
        if request.num_due == 0 and request.num_computed == request.num_known:
            return self.end(request.id, "Length")
        self._preempt_if_due(request)
        return []

    def _complete_sample(self, row: Row, token: int | None) -> list[tuple[int, int | str]]:
        request = row.request
        if request.phase is Phase.FINISHED:
            return []
        request.num_rows_in_flight -= 1
        request.num_samples_in_flight -= 1
        if token is None:
            late_mask_model.leave_out(request, self.in_flight, self.decoders)
            self._preempt_if_due(request)
            return []
        request.has_sampled, request.has_late_mask = True, False
        request.output.append(token)
        self.outlook.lengths.observe_token(len(request.output))
        request.num_computed = request.num_known - 1
        self._publish(request, request.num_computed)
        if token in request.ask.stop_ids:
            return [(request.id, token), *self.end(request.id, "Stop")]
        if len(request.output) == request.num_due:
            return [(request.id, token), *self.end(request.id, "Length")]
        self._preempt_if_due(request)
        return [(request.id, token)]

    def _publish(self, request: Request, num_tokens: int) -> None:
        """Full pages can be found by later prompts: those of a prefill row at its launch, others with their result."""
        size = self.settings.page_size
        while (request.num_published + 1) * size <= min(num_tokens, request.num_shareable):
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
        self._leave_choices(request)
        if request.phase not in (Phase.WAITING, Phase.PREEMPTED):
            if reason != "Abort" and len(request.output) < request.num_due:
                self.outlook.lengths.observe_end(len(request.output))
            self._leave(request)
        request.phase = Phase.FINISHED
        return [(number, reason)]

    def _leave_choices(self, request: Request) -> None:
        """With the last choice go the pages that only choices of its prompt could find."""
        alive = [
            it for it in self.requests if it.first_choice == request.first_choice and it.phase is not Phase.FINISHED
        ]
        if not self.settings.pages.prefix_cache and alive == [request]:
            size = self.settings.page_size
            self.pool.unpublish([request.key(page, size) for page in range(request.num_prompt // size)])

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
