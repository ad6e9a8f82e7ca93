"""The bytes that a rank holds of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class WeightMemory:
    """What a rank holds of its model so far."""

    def __init__(
        self, check: Callable[[int, int], None] | None = None, progress: Callable[[int, int], None] | None = None
    ) -> None:
        """``check`` gets the bytes held and those to come as they change, and raises if memory is too small.

        ``progress`` gets how many of the expected bytes are to come, and how many were expected.
        """
        self.taken: dict[str, int] = {}
        """Bytes that each tensor takes on this rank."""
        self.quantised_types: set[str] = set()
        """Of the matrices that stay quantised."""
        self.num_bytes = 0
        self._to_come: dict[str, int] = {}
        self._num_to_come = 0
        self._num_expected = 0
        self._num_passing = 0
        self._check = check
        self._progress = progress

    def expect(self, least_bytes: Mapping[str, int], num_passing: int = 0) -> None:
        """What each tensor will take at least, on all ranks together, and what reading takes more while it lasts."""
        self._to_come = dict(least_bytes)
        self._num_to_come = self._num_expected = sum(least_bytes.values())
        self._num_passing = num_passing
        self._check_memory()

    def add(self, name: str, num_bytes: int) -> None:
        """One more tensor, or another form of one."""
        self.taken[name] = self.taken.get(name, 0) + num_bytes
        self.num_bytes += num_bytes
        self._num_to_come -= self._to_come.pop(name, 0)
        self._check_memory()
        if self._progress is not None and self._num_expected:
            self._progress(self._num_to_come, self._num_expected)

    def _check_memory(self) -> None:
        if self._check is not None:
            self._check(self.num_bytes, self._num_to_come + self._num_passing)
