"""Client identity as opaque numbers: the engine can tell clients apart, never who they are."""

from __future__ import annotations

import hashlib
import os

from starlette.types import Scope

from plait.settings import HttpSettings

KEY = "plait.api_key"
"""The scope's entry in which `RequireKey` leaves the accepted key."""

_DEFAULTS = HttpSettings()
RANDOM_KEY = os.urandom(32)
"""Random for each process, so that no client can guess another's number."""


class ClientIdentity:
    """Who sent a request: the holder of an API key, or an anonymous client."""

    def __init__(
        self, api_key: bytes | None = None, http: HttpSettings = _DEFAULTS, salt_key: bytes = RANDOM_KEY
    ) -> None:
        self._api_key = api_key
        self._http = http
        self._salt_key = salt_key

    @classmethod
    def of(cls, scope: Scope, http: HttpSettings, salt_key: bytes) -> ClientIdentity:
        """The holder of the accepted key; anonymous if the server asks for none. `salt_key` keys the numbers."""
        return cls(scope.get(KEY), http, salt_key)

    def tenant(self, user: str | None) -> int:
        """Whose share a request counts against: the key's, or everybody's (0).

        With `--trust-user-field` it is that of `user` under this key: a gateway sets it, not the client.
        """
        if user and self._http.trust_user_field:
            return self._number(b"user", self._api_key or b"", user.encode())
        return self._number(b"key", self._api_key) if self._api_key is not None else 0

    def salt(self, cache_salt: str | None) -> int:
        """Who shares cached pages: those with the same key and the same `cache_salt` (0: without either)."""
        if self._api_key is None and cache_salt is None:
            return 0
        return self._number(b"salt", self._api_key or b"", (cache_salt or "").encode())

    def reads_cached_tokens(self, cache_salt: str | None) -> bool:
        """Whether the usage says how much of the prompt was cached.

        Many users may share a key, and the number tells what the others have asked. Those who know a `cache_salt`
        share pages with nobody else.
        """
        return self._http.enable_prompt_tokens_details or cache_salt is not None

    def _number(self, *parts: bytes) -> int:
        """64 bits that stand for these parts under this key."""
        digest = hashlib.blake2b(key=self._salt_key, digest_size=8)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return int.from_bytes(digest.digest(), "little")
