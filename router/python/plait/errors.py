"""Errors that end a command: one sentence for the user, and the exit code for scripts."""

from __future__ import annotations

from plait_proto import ExitCode

DONE = 0
"""Exit code of a server that drained, and of every command that succeeded."""

MEANINGS = {
    ExitCode.BUG: "A bug in Plait.",
    ExitCode.SETTINGS: "A setting that cannot work.",
    ExitCode.HARDWARE: "Hardware or memory. Of `plait bench`: the client was too slow, so a run is invalid.",
    ExitCode.MODEL_FILES: "Model files that are missing, broken or not supported.",
    ExitCode.RANK_LOST: "A rank or a node was lost.",
}
"""Exit codes as `docs/errors.md` lists them."""
ADVICE = {
    ExitCode.BUG: "this is a bug in Plait: please report it with the lines above",
    ExitCode.RANK_LOST: "start the server again; the worker's own lines are above",
}
"""What to do, for failures whose message does not say it."""


class StartError(Exception):
    """Plait cannot start or continue. The message says what was given, what is allowed and what to do."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code


class SettingsError(StartError):
    """A setting that cannot work (exit code 2)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.SETTINGS)


class ModelNotFoundError(StartError):
    """The model's files do not exist (exit code 4)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.MODEL_FILES)
