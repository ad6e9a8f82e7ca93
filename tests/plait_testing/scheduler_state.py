"""What the model of the scheduler's rules keeps of each request, and what it plans."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby
from math import inf

from plait.settings import PageSettings, SchedulerSettings


class Phase(Enum):
    WAITING = "waiting"
    PREEMPTED = "preempted"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FULLY_PLANNED = "fully planned"
    HELD = "held"
    AWAITING_MASK = "awaiting mask"
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
    num_choices: int = 1
    is_masked: bool = False


@dataclass(frozen=True)
class Settings:
    scheduler: SchedulerSettings
    pages: PageSettings
    """With a page size."""
    num_pages: int
    max_model_len: int
    max_rows: int

    @property
    def page_size(self) -> int:
        assert self.pages.page_size is not None
        return self.pages.page_size

    @property
    def pool_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def max_batch_tokens(self) -> int:
        assert self.scheduler.max_batch_tokens is not None
        return self.scheduler.max_batch_tokens

    @property
    def watermark(self) -> int:
        if self.pages.watermark is not None:
            return self.pages.watermark
        return min(max(self.num_pages // 100, 1), self.num_pages - 1)

    @property
    def aging(self) -> int:
        """Microseconds that make up for one step of priority."""
        return max(1, round(self.scheduler.priority_aging_seconds * 1e6))

    @property
    def max_chunk(self) -> int:
        return self.scheduler.long_prefill_token_threshold or self.max_batch_tokens


@dataclass(eq=False)
class Request:  # budget: the model keeps a request's whole state flat, to be read beside the rules
    """A request from its submission to its end."""

    id: int
    ask: Ask
    num_due: int
    """Output tokens after which it ends."""
    first_choice: int
    """The first choice of its prompt, which may be itself."""
    num_shareable: float
    """Leading tokens whose full pages others may find: with the prefix cache all, without it those of a prompt that has
    several choices."""
    salt: int
    admitted_at: float = inf
    """Fair share: its tenant's virtual time at its first admission."""
    since: int = 0
    """When it was submitted, in microseconds."""
    due: int = 0
    """Its arrival, later for each step of priority."""
    phase: Phase = Phase.WAITING
    output: list[int] = field(default_factory=list)
    slot: int = -1
    pages: list[int] = field(default_factory=list)
    num_published: int = 0
    num_planned: int = 0
    num_computed: int = 0
    num_shared: int = 0
    """Leading tokens whose pages came from the cache."""
    num_expected: int = 0
    """Tokens that it was expected to hold at its end."""
    num_found: int = 0
    """Leading tokens that were found in the cache while it waited for the next ones."""
    num_overtaken: int = 0
    """Requests that were admitted before it while it was the head, for lack of its pages."""
    last_step: int = 0
    num_rows_in_flight: int = 0
    num_samples_in_flight: int = 0
    has_sampled: bool = False
    """A token was sampled in its slot."""
    is_kept: bool = False
    """A choice of its prompt has run: it stays in the queue until it runs too."""
    has_late_mask: bool = False
    """The mask has come that a row lacked."""

    @property
    def is_unserved(self) -> bool:
        """Whether it may leave the queue for having waited, or for another."""
        return self.phase is Phase.WAITING and not self.is_kept

    @property
    def known(self) -> tuple[int, ...]:
        """Prompt and output so far."""
        return (*self.ask.prompt, *self.output)

    @property
    def num_prompt(self) -> int:
        return len(self.ask.prompt)

    @property
    def num_queue_tokens(self) -> int:
        """What the queue counts: a prompt once, with its first choice."""
        return self.num_prompt if self.id == self.first_choice else 0

    def num_from_siblings(self, page_size: int) -> int:
        """Tokens that it expects to find in the pages of the first choice."""
        return 0 if self.id == self.first_choice else (self.num_prompt - 1) // page_size * page_size

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
        return (self.salt, *self.known[: (page + 1) * page_size])


@dataclass
class Row:
    request: Request
    start: int
    length: int
    samples: bool
    is_prefill: bool
    is_void: bool = False
    """It follows a token that was not sampled."""


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


def num_prompts(requests: list[Request]) -> int:
    """Prompts in a row: further choices of the one before do not count."""
    return sum(1 for _ in groupby(requests, key=lambda it: it.first_choice))
