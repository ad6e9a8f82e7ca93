"""What the admin listener serves, for its OpenAPI document."""

from __future__ import annotations

from plait.http import admin_answers as answers
from plait.http.admin_bodies import DrainBody, ProfileBody
from plait.http.answer_bodies import Health, OpenDocument
from plait.http.openapi import ANY_PATH, METRICS_TYPE, PAGE_TYPE, Api, Body, Operation, open_paths, schemas_of
from plait.live_view import View

OPERATIONS: dict[str, Operation] = {
    "/": Operation("A live page; it asks with the key that is typed there", None, media=PAGE_TYPE),
    "/openapi.json": Operation("This document", OpenDocument),
    "/health": Operation("As the API's", Health),
    "/ready": Operation("As the API's", Health),
    "/metrics": Operation("Prometheus metrics", None, media=METRICS_TYPE),
    "/admin/events": Operation("What happens, as server-sent events: one each half second", None, event=View),
    "/admin/info": Operation("The server, its model and where it stands", answers.Info),
    "/admin/settings": Operation("The settings in force", OpenDocument),
    "/admin/requests": Operation("Requests that are not answered yet", answers.LiveRequests),
    "/admin/requests/{request_id}": Operation("End a request; its client reads that", answers.Ended, (404,)),
    "/admin/flush_prefix_cache": Operation("Prompts that come from now on find no cached prefix", answers.Flushed),
    "/admin/pause": Operation("Compute no step; requests are taken and wait", answers.Paused, (409,)),
    "/admin/resume": Operation("Compute steps again", answers.Paused),
    "/admin/drain": Operation("Take no more requests, answer those under way, and end", answers.Draining, (409, 413)),
    "/admin/log_level": Operation("Change the level of the engine's log", answers.Level, (413,)),
    "/admin/profile": Operation(
        "Profile the next steps of every rank; answers when the traces are written",
        answers.Profiled,
        (409, 413, 504),
    ),
}
_BODIES = {
    "/admin/drain": (DrainBody, False),
    "/admin/profile": (ProfileBody, False),
    "/admin/log_level": (answers.Level, True),
}


def admin_listener(*, has_keys: bool) -> Api:
    """Of a server whose admin listener has keys, or none."""
    schemas, components = schemas_of(tuple(kind for kind, _ in _BODIES.values()))
    bodies = {
        path: Body(schema, is_required)
        for (path, (_, is_required)), schema in zip(_BODIES.items(), schemas, strict=True)
    }
    parameters = {"request_id": {"type": "string", "minLength": 1, "description": "Its X-Request-Id"}}
    also_open = open_paths(["/"]) if has_keys else None
    return Api(OPERATIONS, bodies, components, parameters, also_open, (*ANY_PATH, 403))
