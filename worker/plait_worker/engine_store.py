"""The store of ranks on several hosts or of several engines: each asks its engine, and opens no port to strangers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist
from plait_proto import StoreOperation

MAX_VALUE_BYTES = 32 << 10
"""What the engine keeps under a key at most."""


class Asked(Protocol):
    """What passes requests on to the store: a rank's link."""

    def ask(self, operation: StoreOperation, key: str, value: bytes, *, of_group: bool) -> Future[bytes | None]:
        """The answer, once it comes."""


class EngineStore(dist.Store):
    """Keys and values that the ranks of a replica share, or those of a group; any thread may use it.

    Raises ``DistStoreError`` if a key does not come in time or the engine refuses a value, and the link's
    ``WorkerError`` if the engine is gone.
    """

    timeout: timedelta
    """Of ``set_timeout``; torch's own property."""

    def __init__(self, link: Asked, *, of_group: bool) -> None:
        """``of_group`` if all ranks of a group share it."""
        super().__init__()
        self._link = link
        self._of_group = of_group

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value of ``MAX_VALUE_BYTES`` at most."""
        raw = value.encode() if isinstance(value, str) else bytes(value)
        if len(raw) > MAX_VALUE_BYTES:
            raise dist.DistStoreError(f"the value of {key} has {len(raw)} bytes; {MAX_VALUE_BYTES} are allowed")
        self._expect(key, self._ask(StoreOperation.SET, key, raw, self.timeout))

    def get(self, key: str) -> bytes:
        """The value, once there is one."""
        return self._expect(key, self._ask(StoreOperation.GET, key, b"", self.timeout))

    def add(self, key: str, value: int) -> int:
        """The sum of all that was added under this key."""
        raw = value.to_bytes(8, "little", signed=True)
        return int(self._expect(key, self._ask(StoreOperation.ADD, key, raw, self.timeout)))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys have values."""
        return all(self._ask(StoreOperation.FIND, key, b"", self.timeout) is not None for key in keys)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys have values."""
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        for key in keys:
            left = timedelta(seconds=max(0.0, deadline - time.monotonic()))
            self._expect(key, self._ask(StoreOperation.GET, key, b"", left))

    def clone(self) -> EngineStore:
        """This store: it is safe for threads."""
        return self

    def _ask(self, operation: StoreOperation, key: str, value: bytes, timeout: timedelta) -> bytes | None:
        asked = self._link.ask(operation, key, value, of_group=self._of_group)
        try:
            return asked.result(timeout.total_seconds())
        except TimeoutError:
            raise dist.DistStoreError(f"no rank has set {key} within {timeout.total_seconds():.0f} s") from None

    @staticmethod
    def _expect(key: str, value: bytes | None) -> bytes:
        if value is None:
            raise dist.DistStoreError(f"the engine's store refused {key}")
        return value
