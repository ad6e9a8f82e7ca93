"""Why a worker ends before it is told to."""

from __future__ import annotations

from plait_proto import ExitCode


class Failure(Exception):
    """The worker cannot go on; the reason says what was found and what to do."""

    def __init__(self, code: ExitCode, reason: str) -> None:
        """``reason`` is one sentence for the person who started the server."""
        super().__init__(reason)
        self.code = code
        self.reason = reason


class EngineFailure(Failure):
    """The engine ended the link or refused it: there is nobody left to tell."""


def ensure(condition: bool, reason: str) -> None:
    """Raise a Failure of code BUG unless ``condition``: the engine's plan and the worker's state disagree."""
    if not condition:
        raise Failure(ExitCode.BUG, reason)
