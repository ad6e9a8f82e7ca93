"""A pool of KV pages in plain Python: every page is free, leased, cached or parked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

Key = tuple[int, ...]

POOLS_UNTIL_HALF = 64
"""When others have cached so many times the pool, a tenant that cached nothing keeps half of its pages."""


class Pages:
    """A page is leased or parked once for each request that uses it."""

    def __init__(self, num: int) -> None:
        self.free = list(reversed(range(num)))
        self.num_kept = num // 2
        """Cached pages that the floors of all tenants keep at most."""
        self.common: list[int] = []
        """Cached pages above the floors; the first is evicted next."""
        self.own: dict[int, list[int]] = {}
        """Each tenant's cached pages up to its floor, least recently released first."""
        self.in_use: set[int] = set()
        """Tenants whose pages were cached since the floors last decayed."""
        self.decay_interval = self.num_until_decay = POOLS_UNTIL_HALF * num
        self.by_key: dict[Key, int] = {}
        self.leases: Counter[int] = Counter()
        self.parkings: Counter[int] = Counter()

    def num_available(self) -> int:
        return len(self.free) + len(self.common) + sum(len(pages) for pages in self.own.values())

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
            self._uncache(page)
            self.leases[page] += 1

    def take(self) -> int:
        """A free page, or else a cached one."""
        page = self.free.pop() if self.free else self._evict()
        self.leases[page] = 1
        return page

    def _evict(self) -> int:
        """A page above the floors, else one of the tenant with the most pages; of equals, of the last one."""
        page = (self.common or max(reversed(self.own.values()), key=len)).pop(0)
        self.by_key = {key: other for key, other in self.by_key.items() if other != page}
        return page

    def publish(self, page: int, key: Key) -> None:
        """The first page of a key stays the one that is found."""
        self.by_key.setdefault(key, page)

    def unpublish(self, keys: list[Key]) -> None:
        """Nobody finds these pages any more."""
        for page in [self.by_key.pop(key) for key in keys if key in self.by_key]:
            if not self.is_held(page):
                self._uncache(page)
                self.free.append(page)

    def _uncache(self, page: int) -> None:
        for cached in (self.common, *self.own.values()):
            if page in cached:
                cached.remove(page)

    def release(self, pages: list[int], tenant: int) -> None:
        """Last page first, so that a prompt's later pages are evicted before the earlier ones."""
        self.own.setdefault(tenant, [])
        for page in reversed(pages):
            self.leases[page] -= 1
            self._return(page, tenant)

    def num_released(self, leases: Iterable[list[int]], kept: Sequence[int]) -> int:
        """Pages that no request holds once these leases are gone, beside those that are kept."""
        lost = Counter(page for pages in leases for page in pages if page not in kept)
        return sum(num == self.leases[page] for page, num in lost.items())

    def park(self, pages: list[int]) -> None:
        for page in pages:
            self.leases[page] -= 1
            self.parkings[page] += 1

    def unpark(self, pages: list[int], tenant: int) -> None:
        self.own.setdefault(tenant, [])
        for page in reversed(pages):
            self.parkings[page] -= 1
            self._return(page, tenant)

    def _return(self, page: int, tenant: int) -> None:
        if self.is_held(page):
            return
        if page in self.by_key.values():
            self._cache(page, tenant)
        else:
            self.free.append(page)

    def _cache(self, page: int, tenant: int) -> None:
        """A tenant keeps what it released last, up to its part of half the pool."""
        self.own[tenant].append(page)
        self.in_use.add(tenant)
        self._demote(tenant, max(self.num_kept // sum(len(pages) > 0 for pages in self.own.values()), 1))
        self.num_until_decay -= 1
        if self.num_until_decay == 0:
            self._decay()

    def _decay(self) -> None:
        """Who has cached nothing for so long keeps half."""
        for tenant in [it for it in self.own if it not in self.in_use]:
            self._demote(tenant, len(self.own[tenant]) // 2)
        self.in_use.clear()
        self.num_until_decay = self.decay_interval

    def _demote(self, tenant: int, num_left: int) -> None:
        own = self.own[tenant]
        while len(own) > num_left:
            self.common.append(own.pop(0))
