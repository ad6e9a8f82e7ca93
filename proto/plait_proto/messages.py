"""The messages between engine and worker; ``proto/README.md`` is the contract.

The fields of a message that is one array stand in the wire's order. ``u32`` and ``u64`` are checked
when a message is decoded, not when it is made.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

PROTOCOL = 1
"""The protocol that this package speaks."""

U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, msgspec.Meta(ge=0)]
Bin16 = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

Words = bytes | memoryview
"""Little-endian 4-byte words. A decoded message holds views of format ``I``, one int an element, over
the frames it came in; a message to be encoded may hold any C-contiguous buffer of such words."""


class Kind(enum.IntEnum):
    """Frame 0: which message follows."""

    HELLO = 1
    WELCOME = 2
    PLAN = 3
    STEP_RESULT = 4
    VOTE = 5
    DECISION = 6
    DRAIN = 7
    HEARTBEAT = 8
    FAIL = 9
    BYE = 10
    JOIN = 11
    STORE_REQUEST = 12
    STORE_REPLY = 13
    STEP_MASKS = 14
    FORWARD_DONE = 15


class Mode(enum.IntEnum):
    """Row kinds of a group's step."""

    IDLE = 0
    PREFILL = 1
    DECODE = 2
    MIXED = 3


class ExitCode(enum.IntEnum):
    """What a process ends with when it fails."""

    BUG = 1
    SETTINGS = 2
    HARDWARE = 3
    MODEL_FILES = 4
    RANK_LOST = 5


class Fields(msgspec.Struct, array_like=True, frozen=True):
    """Base of structs that are one positional array on the wire."""


class PageKind(Fields, frozen=True):
    """Pages of one kind: what one group of layers caches."""

    page_size: U32
    """Tokens in a page."""
    num_pages: U32
    """Pages of the pool."""
    page_bytes: U64
    """One page over all layers of this kind."""


class CapturedSize(Fields, frozen=True):
    """What fits into a captured CUDA graph."""

    prompt_tokens: U32
    """Of prefill rows."""
    prompt_rows: U32
    """Prefill rows; the last is never used."""
    decode_rows: U32
    context_tokens: U32 | None
    """Cached tokens of all prefill rows, if their attention is planned before each replay."""


class SlotState(Fields, frozen=True):
    """What a rank keeps for each slot beside its pages."""

    slot_bytes: U64
    """One slot over all layers of the rank."""
    snapshot_bytes: U64
    """One snapshot: what of a slot's state is in use at a page boundary."""
    num_snapshots: U32
    """Snapshots that the device has room for, or as many as the settings asked for."""


class Hello(Fields, frozen=True):
    """A worker has loaded its weights and is ready to serve."""

    protocol: U32
    schema: Bin16
    """``SCHEMA_FINGERPRINT`` of the worker."""
    config: Bin16
    """``config_fingerprint`` of the configuration file that the worker was given."""
    rank: U32
    world: U32
    pid: U32
    device: str
    """Its device, for people."""
    dtype: str
    """Its number format, such as ``bfloat16``."""
    num_pages: U32
    """Pages that the device has room for, or as many as the settings asked for."""
    page_bytes: U64
    """One page over all layers of this rank."""
    weight_bytes: U64
    other_kinds: tuple[PageKind, ...] = ()
    """Page kinds after the first, which the fields above describe; left out while it and the fields after it
    are empty."""
    graphs: tuple[CapturedSize, ...] = ()
    """Sizes of the CUDA graphs that the worker captures; left out while it is empty, and there is no ``slot_state``."""
    slot_state: SlotState | None = None
    """What the model keeps for each slot beside its pages; left out if it keeps nothing."""


class Welcome(Fields, frozen=True):
    """All ranks said Hello: what the worker must allocate."""

    num_slots: U32
    num_pages: U32
    """The least that any rank has room for."""
    max_batch_tokens: U32
    max_rows: U32
    replica: U32
    num_replicas: U32
    credit: U32
    """Plans that may be in flight."""
    other_kinds: tuple[PageKind, ...] = ()
    """Page kinds after the first, with the least pages that any rank has room for; left out while it is empty
    and there are no snapshots."""
    num_snapshots: U32 = 0
    """Snapshots of slot state: the least that any rank has room for; left out while it is 0."""


class PromptCounts(Fields, frozen=True):
    """What choosing a captured step must know of a replica's prefill rows."""

    num_rows: U32
    num_context_tokens: U32
    """Cached tokens that they attend to."""


class Vote(Fields, frozen=True):
    """What a replica would do in a step of its group."""

    replica: U32
    step: U64
    num_prefill_tokens: U32
    num_decode_rows: U32
    num_tokens: U32
    wants_mixed: bool
    can_graph: bool
    idle: bool
    draining: bool
    prompts: PromptCounts | None = None
    """Of the prefill rows; left out while there are none and ``graphs`` is empty."""
    graphs: tuple[CapturedSize, ...] = ()
    """In a first vote the sizes that all ranks of its engine capture; left out while it is empty."""


class Decision(Fields, frozen=True):
    """What the group does in a step: a pure function of its votes."""

    step: U64
    mode: Mode
    pad_tokens: U32
    """The most tokens of a replica, or those of the graphs."""
    graph_bucket: U32 | None
    """Tokens of the captured graphs that the replicas run, if some fit."""
    dummy_replicas: bytes
    """Bitmap: replica i, bit ``i % 8`` of byte ``i // 8``, has nothing to do and runs a dummy row."""
    stop: bool
    """All replicas are idle and one drains: the group ends."""
    draining: bool
    """A replica drains: no replica takes new requests."""
    tokens: bytes = b""
    """Little-endian u32s, the prompt tokens and all tokens of each replica in order; left out while all are idle."""


class Drain(Fields, frozen=True):
    """No plan follows: finish, say Bye, exit."""


class Heartbeat(Fields, frozen=True):
    """The worker's link is alive; ``step`` is the last step finished."""

    rank: U32
    step: U64


class Fail(Fields, frozen=True):
    """The sender gives up (a worker), or rejects the receiver (the engine)."""

    rank: U32
    code: ExitCode
    reason: str
    """What went wrong and what to do, for people."""


class Bye(Fields, frozen=True):
    """The worker has drained and exits."""

    rank: U32
    num_steps: U64


class Fact(Fields, frozen=True):
    """Something that all engines of a group must share."""

    name: str
    """A flag, or what it is in words."""
    value: str


class Join(Fields, frozen=True):
    """An engine asks the group's coordinator to let it join."""

    protocol: U32
    schema: Bin16
    config: Bin16
    """Fingerprint of everything that all engines of the group must share."""
    engine: U32
    num_engines: U32
    first_replica: U32
    num_replicas: U32
    """Of this engine."""
    facts: tuple[Fact, ...] = ()
    """What ``config`` is the fingerprint of, for people; left out while it is empty."""


class StoreOperation(enum.IntEnum):
    """What is done with a key of the store."""

    SET = 0
    ADD = 1
    """To a number, which is 0 before; the reply has the sum in decimal digits."""
    GET = 2
    """The reply comes once the key has a value."""
    FIND = 3
    """The reply comes at once."""


class StoreRequest(Fields, frozen=True):
    """A rank uses the store in which the ranks of its replica, or of its group, find each other."""

    rank: U32
    id: U64
    """Chosen by the rank; the reply has it too."""
    of_group: bool
    """The store is that of all ranks of the group, not of the rank's replica."""
    operation: StoreOperation
    key: str
    value: bytes
    """What to set, or a little-endian i64 to add; empty otherwise."""


class StoreReply(Fields, frozen=True):
    """The answer to a ``StoreRequest``."""

    rank: U32
    id: U64
    """Of the request."""
    value: bytes | None
    """What the key has now, if anything."""


class NewSlot(Fields, frozen=True):
    """A request enters a slot; what the slot held is forgotten."""

    slot: U32
    next_output: U32
    """Index of the next output token: more than 0 after a preemption."""
    temperature: float
    """0 is greedy."""
    top_k: U32
    """0 keeps the whole vocabulary."""
    top_p: float
    """1 keeps the whole vocabulary."""
    min_p: float
    """0 keeps the whole vocabulary."""
    seed: U64
    """The random number of output token i is Philox(seed, i)."""
    logprobs: U32 | None
    """K of the records that each output token gets."""
    prompt_logprobs: U32 | None
    """K of the records that each prompt token but the first gets."""


class PlanHeader(Fields, frozen=True):
    """Frame 1 of a plan."""

    step: U64
    num_prefill: U32
    num_decode: U32
    new_slots: tuple[NewSlot, ...]
    decision: Decision | None
    awaits_masks: bool = False
    """Left out while it is false."""


class Plan(msgspec.Struct, frozen=True):  # budget: one field a frame
    """One step. A worker applies it in the order freed, new, trimmed, appended, restored, rows, saved."""

    step: int
    """0 is the warm-up."""
    num_prefill: int
    num_decode: int
    new_slots: tuple[NewSlot, ...]
    decision: Decision | None
    rows: Words
    """``slot, start, length, flags`` of each prefill row, then ``slot, start`` of each decode row.
    Where a decode row computes drafts, the length of each decode row follows."""
    token_ids: Words
    """Of the prefill rows, one row after the other; one more than its length for a row with lookahead."""
    appended_pages: Words
    """``slot, page`` of each page of kind 0; a slot's pages fill its table in this order."""
    freed_slots: Words
    other_pages: Words = b""
    """``kind, slot, page`` of each page of another kind; left out while it is empty."""
    trimmed_slots: Words = b""
    """``kind, slot, num_pages``: a slot keeps its first pages. Left out while it is empty."""
    adjustments: Words = b""
    """Records of the new slots that change their logits (``plait_proto.adjustments``). Left out while it is empty."""
    scored_ids: Words = b""
    """``slot, id``: a token whose log-probability a new slot's records have besides those of the best ones, in this
    order. Left out while it is empty."""
    restored_slots: Words = b""
    """``slot, snapshot``: a new slot's state comes from a snapshot, before the step's rows. Left out while it is
    empty."""
    saved_slots: Words = b""
    """``slot, position, snapshot``: the slot's state after its first ``position`` tokens becomes a snapshot. A row of
    this plan passes the position, which is a page boundary, or ends there. Left out while it is empty."""
    pooled_slots: Words = b""
    """``slot, pooling`` of each new slot whose hidden states are pooled: ``POOLS_LAST`` or ``POOLS_MEAN``. Left out
    while it is empty."""
    awaits_masks: bool = False
    """Rows sample under masks: the step is sampled when its last ``StepMasks`` is there."""


IS_LAST_CHUNK = 1
"""Flag of a prefill row: a token is sampled after it."""
LOOKAHEAD = 2
"""Flag of a prefill row: one more token id follows the chunk's, which is not computed."""
POOLS_LAST = 1
"""The vector of a pooled prompt is the hidden state of its last token."""
POOLS_MEAN = 2
"""It is the mean of its tokens' hidden states."""


FAILED_ROW = 0xFFFFFFFF
"""Stands for the token of a row whose logits were NaN or infinite."""
NO_RESULT = "no result in time"
"""In the engine's reason for a replica that it gives up because a step has not ended."""


class ResultHeader(Fields, frozen=True):
    """Frame 1 of a step's result."""

    step: U64
    elapsed_us: U64


class StepResult(msgspec.Struct, frozen=True):
    """What rank 0 sampled in a step."""

    step: int
    elapsed_us: int
    """The step's own time: from taking the plan, or from the end of the step before if that is later."""
    num_accepted: Words
    """Tokens accepted of each row that samples, in row order; 0 of one that was left out for lack of its mask."""
    token_ids: Words
    """Their ids, one row after the other; ``FAILED_ROW`` of a row that failed."""
    logprobs: Words
    """``logprob f32, rank, K ids, K logprobs f32`` of each accepted token whose request asked for it."""
    prompt_logprobs: Words
    """The same for the prompt tokens that this step's prefill rows predicted."""
    pooled: Words = b""
    """Elements (f32) of a vector for each prefill row that ended a pooled prompt, in row order. Left out while it is
    empty."""


class MasksHeader(Fields, frozen=True):
    """Frame 1 of a step's masks."""

    step: U64
    is_last: bool
    """No other message with masks of this step follows."""
    num_mask_words: U32
    """Words of a mask."""


class StepMasks(msgspec.Struct, frozen=True):
    """Which tokens rows of a step may sample. Rows are counted among those that sample."""

    step: int
    is_last: bool
    num_mask_words: int
    masked: Words
    """``row, position, mask``: the number of the mask under which a row's token is sampled."""
    left_out: Words
    """Rows that sample nothing: their masks are late, or their tokens are not wanted."""
    new_masks: Words
    """``mask, words``: its number, under which it is kept until another one gets that number; bit ``t % 32`` of word
    ``t // 32`` allows token t."""


class ForwardDone(Fields, frozen=True):
    """The device has finished the forward of a step that awaits masks, and they are not here."""

    step: U64


Message = (
    Hello
    | Welcome
    | Plan
    | StepResult
    | Vote
    | Decision
    | Drain
    | Heartbeat
    | Fail
    | Bye
    | Join
    | StoreRequest
    | StoreReply
    | StepMasks
    | ForwardDone
)
