"""Fair share in plain Python: the virtual time of tenants."""

from __future__ import annotations

from dataclasses import dataclass, field

TIME_PER_TOKEN = 16_384
"""Virtual time of a unit of work at weight 1. Until steps were measured, a token is a unit."""


@dataclass
class Tenant:
    """A tenant with waiting or running requests."""

    time: int
    weight: int
    num_requests: int = 0


@dataclass
class FairShare:
    """Work advances its tenant's time by cost over weight, and the system's by cost over the weight of all present."""

    present: dict[int, Tenant] = field(default_factory=dict)
    debts: dict[int, int] = field(default_factory=dict)
    """Times of absent tenants, where they are ahead of the system's."""
    system: int = 0
    remainder: int = 0
    latest: int = 0

    def enter(self, tenant: int, weight: int) -> None:
        """A request is submitted. A newcomer starts at the system's time, or where it left in debt."""
        if tenant not in self.present:
            time = max(self.debts.pop(tenant, 0), self.system)
            self.present[tenant] = Tenant(time, weight)
        self.present[tenant].weight = weight
        self.present[tenant].num_requests += 1

    def leave(self, tenant: int) -> None:
        """A request ended."""
        left = self.present[tenant]
        left.num_requests -= 1
        if not left.num_requests:
            del self.present[tenant]
            self.debts[tenant] = left.time

    def start_waiting(self, tenant: int) -> None:
        """Its first request waits. Time that it left unused is lost."""
        self.present[tenant].time = max(self.present[tenant].time, self.system)

    def charge(self, tenant: int, num_tokens: int) -> None:
        work = num_tokens * TIME_PER_TOKEN
        charged = self.present[tenant]
        charged.time += work // charged.weight
        self.latest = max(self.latest, charged.time)
        passed, self.remainder = divmod(self.remainder + work, sum(it.weight for it in self.present.values()))
        self.system += passed

    def catch_up(self, least_waiting: int | None) -> None:
        """The system is never behind all who wait. If nobody does, work so far is no debt."""
        self.system = max(self.system, self.latest if least_waiting is None else least_waiting)
