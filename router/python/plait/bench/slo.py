"""SLO: the limits on a good request's latencies."""

from __future__ import annotations

import re

import msgspec

from plait.errors import SettingsError

_LIMIT = re.compile(r"(?P<name>ttft|tpot|itl|e2e)=(?P<value>\d+(?:\.\d+)?)(?P<unit>ms|s)")


class Slo(msgspec.Struct, frozen=True):
    """Limits in seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    """Limit on the longest gap between two chunks of a request."""
    e2e: float | None = None

    def is_met(self, ttft: float | None, tpot: float | None, itl: float | None, e2e: float) -> bool:
        """Whether a request meets the limits. A single token has no gaps, and so meets a limit on them."""
        if self.ttft is not None and ttft is None:
            return False
        pairs = ((ttft, self.ttft), (tpot, self.tpot), (itl, self.itl), (e2e, self.e2e))
        return all(value is None or limit is None or value <= limit for value, limit in pairs)

    @property
    def needs_stream(self) -> bool:
        """Whether a limit needs streamed responses."""
        return (self.ttft, self.tpot, self.itl) != (None, None, None)

    @property
    def words(self) -> str:
        """The limits as text."""
        stated = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return ", ".join(f"{name} <= {value * 1000:g} ms" for name, value in stated.items())


def read_slo(words: str) -> Slo:
    """Parse limits such as `ttft=500ms,itl=100ms`; raises `SettingsError`."""
    matches = [_LIMIT.fullmatch(word.strip()) for word in words.split(",")]
    found = {
        match["name"]: float(match["value"]) / (1000 if match["unit"] == "ms" else 1) for match in matches if match
    }
    if len(found) != len(matches):
        raise SettingsError(
            f"--slo is {words!r}; allowed: ttft, tpot, itl and e2e, each once, as NAME=NUMBERms or NAME=NUMBERs, "
            "separated by commas: --slo ttft=500ms,itl=100ms"
        )
    return Slo(**found)
