"""`POST /admin/profile`: torch's profiler over the next steps of every rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Protocol

import msgspec
from fastapi import FastAPI, Request, Response

from plait.http.admin_answers import MissingTrace, Profiled, RankTrace
from plait.http.admin_bodies import ProfileBody, json_response, read_body
from plait.http.errors import ApiError


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a profile."""

    folder: str
    traces: list[RankTrace]
    missing: list[MissingTrace]
    has_timed_out: bool = False
    """The deadline passed before all steps had come."""


class Profiles(Protocol):
    """Takes one profile at a time."""

    @property
    def is_taken(self) -> bool:
        """Whether one is under way."""

    async def take(self, num_steps: int, deadline_seconds: float) -> Profile:
        """Profile the next steps of all ranks; returns when the traces are written, or cannot be.

        Cancelled, it ends: ranks write what they have. Raises `ApiError` while another is under way.
        """


def add_profile(app: FastAPI, profiles: Profiles | None, require_ready: Callable[[], None]) -> None:
    """Add the path; `require_ready` raises an `ApiError` if no steps will come."""

    @app.post("/admin/profile")
    async def profile(request: Request) -> Response:
        asked = await read_body(request, ProfileBody)
        if profiles is None:
            raise ApiError(409, "there is no folder for traces; start the server with --profile-dir FOLDER")
        require_ready()
        taken = await _unless_left(request, profiles.take(asked.steps, asked.deadline_seconds))
        if not taken.traces:
            raise _nothing(taken)
        return json_response(Profiled(folder=taken.folder, traces=taken.traces, missing=taken.missing))


async def _unless_left(request: Request, taking: Coroutine[None, None, Profile]) -> Profile:
    """The profile. A client that leaves ends it."""
    task, left = asyncio.create_task(taking), asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(408, "the client left, and its profile ended")
        return task.result()
    finally:
        task.cancel()
        left.cancel()


def _nothing(profile: Profile) -> ApiError:
    reasons = "; ".join(f"rank {one.rank} {one.reason}" for one in profile.missing)
    if profile.has_timed_out:
        return ApiError(504, f"no trace was written: {reasons}. Send requests meanwhile, or give a longer deadline")
    return ApiError(503, f"no trace was written: {reasons}")
