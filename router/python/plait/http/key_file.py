"""The API key file, which is read again when it changes: keys come and go while streams run.

A request is admitted or not when it begins; what was admitted goes on when its key is taken out.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

from plait.errors import SettingsError
from plait.http.auth import ApiKeys
from plait.http.key_terms import KeyTerms
from plait.output import forward_to_stderr
from plait.settings import Policy

POLL_SECONDS = 1.0
_EOF = b"# EOF\n"


class _Stamp(NamedTuple):
    """What tells one state of a file from another."""

    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int
    """A change of mode counts too."""


class KeyFile:
    """The keys of a file. A new state of it that cannot be used is refused, and the keys before it stay."""

    def __init__(self, path: Path, policy: Policy) -> None:
        """Read it; raises `SettingsError` if it cannot be used."""
        self._path = path
        self._policy = policy
        self._read = self._seen = _stamp(path)
        self._keys = ApiKeys.from_file(path, policy)
        self._num_loaded = self._num_refused = 0
        self._problem: str | None = None
        """What is wrong with the file as it is now. It is read again at each poll: reading itself may have failed."""

    def admit(self, key: bytes) -> KeyTerms | None:
        """What `key` is granted now; None if it is not one of ours."""
        return self._keys.admit(key)

    def poll(self) -> None:
        """Read the file if it has changed, and has not since the last poll: its writer is through."""
        stamp = _stamp(self._path)
        settled, self._seen = stamp == self._seen, stamp
        if settled and (stamp != self._read or self._problem is not None):
            self._read = stamp
            self._reload()

    def _reload(self) -> None:
        try:
            self._keys = ApiKeys.from_file(self._path, self._policy)
        except SettingsError as error:
            if str(error) != self._problem:
                self._num_refused += 1
                _log(f"kept the {len(self._keys)} that were read before, for {error}")
            self._problem = str(error)
            return
        self._num_loaded += 1
        self._problem = None
        _log(f"{len(self._keys)} from {self._path}, which has changed")

    async def watch(self) -> None:
        """Poll until cancelled. The file's disk may be slow: a thread reads it."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await asyncio.to_thread(self.poll)

    def metrics(self) -> bytes:
        """OpenMetrics text, without its end."""
        return (
            "# HELP plait_api_keys API keys that are accepted.\n"
            "# TYPE plait_api_keys gauge\n"
            f"plait_api_keys {len(self._keys)}\n"
            "# HELP plait_api_key_file_refused 1 while the API key file cannot be used and the keys before it count.\n"
            "# TYPE plait_api_key_file_refused gauge\n"
            f"plait_api_key_file_refused {int(self._problem is not None)}\n"
            "# HELP plait_api_key_file_changes Changed states of the API key file, by what became of them.\n"
            "# TYPE plait_api_key_file_changes counter\n"
            f'plait_api_key_file_changes_total{{result="loaded"}} {self._num_loaded}\n'
            f'plait_api_key_file_changes_total{{result="refused"}} {self._num_refused}\n'
        ).encode()


def with_key_metrics(engine_text: bytes, keys: KeyFile) -> bytes:
    """The engine's `/metrics` with those of the key file."""
    return engine_text.removesuffix(_EOF) + keys.metrics() + _EOF


def _log(what: str) -> None:
    forward_to_stderr(f"API keys: {what}\n".encode())


def _stamp(path: Path) -> _Stamp | None:
    """None if it cannot be looked at: the next read says why."""
    try:
        found = path.stat()
    except OSError:
        return None
    return _Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
