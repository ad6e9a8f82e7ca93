"""How often a server, or the ranks of a replica, are started again after a loss. A file keeps the count."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
from plait_proto import UNDECODABLE, ExitCode

from plait.errors import SettingsError, StartError
from plait.output import say

WINDOW_SECONDS = 3600.0
FIRST_BACKOFF_SECONDS = 5.0
MAX_BACKOFF_SECONDS = 300.0
MAX_FILE_BYTES = 1 << 16
RESTARTED = (ExitCode.RANK_LOST, ExitCode.BUG)
"""What another start may mend. Settings, hardware and model files stay as they are."""
RESTARTED_ONCE_SERVED = (*RESTARTED, ExitCode.HARDWARE)
"""The same of a server that was ready: it had enough memory, and may have it again."""

Policy = Literal["never", "group", "backoff"]


class _Kept(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a server that starts its ranks again."""

    model: str
    losses: list[float]


@contextlib.contextmanager
def restart_file_held(file: str | None) -> Iterator[None]:
    """Keep other servers from a file as long as this process lives. Raises `SettingsError` if one has it.

    Each writes all losses that it knows, and so would lose those of the other. A file beside it is locked: the file
    itself is replaced whenever it is written. File systems without locks hold nothing.
    """
    if file is None:
        yield
        return
    path = Path(os.path.realpath(file))
    try:
        lock = _opened_lock(path.parent / f".{path.name}.lock")
    except OSError as error:
        raise _unwritable(file, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"--restart-file {file} counts the losses of a server that runs already: give each server a file of "
                "its own, or stop that one"
            ) from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise _unwritable(file, error) from error
        yield


def _opened_lock(path: Path) -> BinaryIO:
    """Nothing is written to it. In a folder like /tmp another user may have put a link or a pipe there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return open(os.open(path, flags, 0o600), "r+b", buffering=0)


def _unwritable(file: str, error: OSError) -> SettingsError:
    return SettingsError(
        f"--restart-file {file} cannot be written: {error.strerror}; give a file in a folder that can be"
    )


class RestartBudget:
    """The losses of the last hour."""

    def __init__(
        self, policy: Policy, budget: int, file: str | None, *, model: str | None = None, is_first_at_once: bool = False
    ) -> None:
        """Read the file, if there is one, and write it. Raises `SettingsError` if that fails or its `model` is another.

        With `is_first_at_once`, backoff begins with the second loss.
        """
        self._policy, self._budget = policy, budget
        self._file = Path(file) if file is not None else None
        # A path need not be UTF-8, JSON must be.
        self._model = None if model is None else os.fsencode(model).decode(errors="backslashreplace")
        self._num_at_once = int(is_first_at_once)
        self._losses = _read(self._file, self._model) if self._file is not None else []
        try:
            self._store()
        except OSError as error:
            raise _unwritable(str(file), error) from error

    def delay_at_start(self, now: float) -> float:
        """Seconds to wait before the first start. Raises `StartError` if an earlier launcher has spent the budget."""
        recent = self._recent(now)
        if self._policy == "never" or not recent:
            return 0.0
        if len(recent) > self._budget:
            wait = (recent[-self._budget - 1] + WINDOW_SECONDS - now) / 60
            raise StartError(
                f"{self._file} has {len(recent)} losses within an hour, --restart-budget allows {self._budget}; find "
                f"their cause, then remove the file, or wait {wait:.0f} minutes",
                ExitCode.RANK_LOST,
            )
        return max(0.0, recent[-1] + self._backoff(len(recent)) - now)

    def after_loss(self, code: int, now: float, *, has_served: bool = False) -> float | None:
        """Seconds to wait before another start; None: no more. Counts the loss. Times are those of the wall clock."""
        if code not in (RESTARTED_ONCE_SERVED if has_served else RESTARTED):
            return None
        recent = self._losses = [*self._recent(now), now]
        self._write()
        if self._policy == "never" or len(recent) > self._budget:
            return None
        return self._backoff(len(recent))

    def _recent(self, now: float) -> list[float]:
        return [at for at in self._losses if now - WINDOW_SECONDS < at <= now]

    def _backoff(self, num_losses: int) -> float:
        num_delayed = num_losses - self._num_at_once
        if self._policy != "backoff" or num_delayed < 1:
            return 0.0
        return min(MAX_BACKOFF_SECONDS, FIRST_BACKOFF_SECONDS * 2.0 ** (num_delayed - 1))

    def _write(self) -> None:
        try:
            self._store()
        except OSError as error:
            # Streams that wait for new ranks are worth more than the count.
            say(f"--restart-file {self._file} cannot be written: {error.strerror}; losses are counted in memory only")

    def _store(self) -> None:
        """What a link names is written, not the link. Raises `OSError`."""
        if self._file is None:
            return
        file = Path(os.path.realpath(self._file))
        new = file.with_name(f".{file.name}.{os.getpid()}")
        try:
            new.write_bytes(
                msgspec.json.encode(self._losses if self._model is None else _Kept(self._model, self._losses))
            )
            new.replace(file)
        except OSError:
            new.unlink(missing_ok=True)
            raise


def _read(file: Path, model: str | None) -> list[float]:
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
            raise SettingsError(f"--restart-file {file} is no file of restarts; give another")
        kept = msgspec.json.decode(file.read_bytes(), type=list[float] | _Kept)
    except FileNotFoundError:
        return []
    except (OSError, *UNDECODABLE) as error:
        raise SettingsError(f"--restart-file {file} cannot be read: {error}; remove it, or give another") from error
    given = kept.model if isinstance(kept, _Kept) else None
    if given != model:
        raise SettingsError(
            f"--restart-file {file} counts the restarts of {given or 'a launcher'}, not of {model or 'a launcher'}; "
            "give another file, or remove it"
        )
    return kept.losses if isinstance(kept, _Kept) else kept
