"""What the admin listener answers in one JSON body."""

from __future__ import annotations

from typing import Literal

import msgspec

from plait.http.engine import Description, Status


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An object without further names."""


class Info(Answer):
    """Answer of `GET /admin/info`."""

    version: str
    url: str
    """Of the API."""
    seconds: float
    """Since the listener began."""
    open_streams: int
    profiling: bool
    """A profile is under way."""
    model: Description
    status: Status


class LiveRequest(Answer, kw_only=True):
    """A call that is not answered yet."""

    id: str
    """Its X-Request-Id."""
    path: str
    key: str
    """The key's name, or the beginning of its SHA-256; empty without one."""
    state: Literal["preparing", "waiting", "running"] = "preparing"
    """Of the choice that has come farthest."""
    replica: int | None = None
    num_choices: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float


class LiveRequests(Answer):
    """Answer of `GET /admin/requests`."""

    requests: list[LiveRequest]
    silent_replicas: list[int]
    """They have not said what they do with their calls."""


class Ended(Answer):
    """Answer of `DELETE /admin/requests/ID`: how many had that id."""

    ended: int


class Flushed(Answer):
    """Answer of `POST /admin/flush_prefix_cache`."""

    flushed: Literal[True] = True


class Paused(Answer):
    """Answer of `POST /admin/pause` and `/admin/resume`."""

    paused: bool


class Draining(Answer):
    """Answer of `POST /admin/drain`: how many are under way."""

    draining: int


class Level(Answer):
    """The level of the engine's log: body and answer of `PUT /admin/log_level`."""

    level: Literal["debug", "info", "warning", "error"]


class RankTrace(Answer):
    """A trace that was written."""

    rank: int
    replica: int
    file: str
    first_step: int
    num_steps: int
    """Fewer than were asked for if no more came in time."""


class MissingTrace(Answer):
    """A rank without one."""

    rank: int
    replica: int
    reason: str


class Profiled(Answer):
    """Answer of `POST /admin/profile`."""

    folder: str
    traces: list[RankTrace]
    missing: list[MissingTrace]
