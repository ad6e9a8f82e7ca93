"""A pool of KV pages in plain Python: every page is free, leased, cached or parked."""

from __future__ import annotations

from collections import Counter

Key = tuple[int, ...]


class Pages:
    """A page is leased or parked once for each request that uses it."""

    def __init__(self, num: int) -> None:
        self.free = list(reversed(range(num)))
        self.cached: list[int] = []
        """Least recently released first: the order of eviction."""
        self.by_key: dict[Key, int] = {}
        self.leases: Counter[int] = Counter()
        self.parkings: Counter[int] = Counter()

    def num_available(self) -> int:
        return len(self.free) + len(self.cached)

    def num_parked(self) -> int:
        return sum(self.parkings[page] > 0 and self.leases[page] == 0 for page in self.parkings)

    def is_held(self, page: int) -> bool:
        return self.leases[page] + self.parkings[page] > 0

    def find(self, keys: list[Key]) -> list[int]:
        """The leading pages that have been published."""
        found = []
        for key in keys:
            if key not in self.by_key:
                break
            found.append(self.by_key[key])
        return found

    def lease(self, pages: list[int]) -> None:
        for page in pages:
            if page in self.cached:
                self.cached.remove(page)
            self.leases[page] += 1

    def take(self) -> int:
        """A free page, or else the least recently released one."""
        page = self.free.pop() if self.free else self._evict()
        self.leases[page] = 1
        return page

    def _evict(self) -> int:
        page = self.cached.pop(0)
        self.by_key = {key: other for key, other in self.by_key.items() if other != page}
        return page

    def publish(self, page: int, key: Key) -> None:
        """The first page of a key stays the one that is found."""
        self.by_key.setdefault(key, page)

    def release(self, pages: list[int]) -> None:
        """Last page first, so that a prompt's later pages are evicted before the earlier ones."""
        for page in reversed(pages):
            self.leases[page] -= 1
            self._return(page)

    def park(self, pages: list[int]) -> None:
        for page in pages:
            self.leases[page] -= 1
            self.parkings[page] += 1

    def unpark(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.parkings[page] -= 1
            self._return(page)

    def _return(self, page: int) -> None:
        if self.is_held(page):
            return
        if page in self.by_key.values():
            self.cached.append(page)
        else:
            self.free.append(page)
