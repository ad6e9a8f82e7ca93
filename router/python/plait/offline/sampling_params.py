"""How an answer is sampled, and when it ends."""

from __future__ import annotations

import msgspec

from plait.http.bodies import Integer, Json, TextFields


class SamplingParams(TextFields, kw_only=True):
    """The fields of the API's bodies by the same names (docs/api.md); None: as over HTTP.

    `structured_outputs` may be a dict.
    """

    n: Integer | None = None
    seed: Integer | None = None
    logprobs: Integer | None = None
    """Best tokens to list with each output token; 0: only the token itself."""
    prompt_logprobs: Integer | None = None
    priority: Integer | None = None
    cache_salt: str | None = None

    def fields(self) -> dict[str, Json]:
        """Those that are given."""
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None and value != msgspec.Raw()}
