"""Authentication on every path but the three for probes, and `/metrics` if that is open.

Keys come as `Authorization: Bearer KEY` or `x-api-key: KEY`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from plait.errors import SettingsError
from plait.http.errors import ApiError, send_error
from plait.http.identity import KEY
from plait.http.key_terms import READERS, TERMS, KeyTerms, parse_line
from plait.secret_file import read_secret_file
from plait.settings import Policy

PROBES = frozenset({b"/health", b"/ping", b"/ready"})
METRICS = b"/metrics"
PAGE = b"/"
"""HTML with nothing of the server's: its script asks with the key that the user types."""
MAX_KEY_FILE_BYTES = 65_536
API_KEY_FLAG = "--api-key-file"


class Admits(Protocol):
    """Keys, or a file whose keys may change."""

    def admit(self, key: bytes) -> KeyTerms | None:
        """What `key` is granted; None if it is not one of ours."""


class ApiKeys:
    """The accepted keys, kept as SHA-256 digests, and what each is granted."""

    def __init__(self, keys: Mapping[str, KeyTerms]) -> None:
        self._terms = {hashlib.sha256(key.encode()).digest(): terms for key, terms in keys.items()}

    @classmethod
    def from_file(cls, path: Path, policy: Policy, flag: str = API_KEY_FLAG) -> ApiKeys:
        """The keys in a file; raises `SettingsError` if it cannot be used, or grants what `policy` does not read."""
        keys = read_keys(path, flag)
        granted = {name for terms in keys.values() for name in terms.granted()}
        for name in sorted(granted):
            if policy not in READERS[name]:
                readers = " or ".join(READERS[name])
                raise SettingsError(
                    f"{flag} {path} has `{name}=`, which --policy {policy} does not read; start with --policy "
                    f"{readers}, or take `{name}=` out of the file"
                )
        return cls(keys)

    def __len__(self) -> int:
        return len(self._terms)

    def admit(self, key: bytes) -> KeyTerms | None:
        """What `key` is granted; None if it is not one of ours. The time taken depends on no key."""
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._terms]
        return self._terms[digest] if any(matches) else None


def read_keys(path: Path, flag: str = API_KEY_FLAG) -> dict[str, KeyTerms]:
    """The keys in a file, one a line, each with its terms; raises `SettingsError` if it cannot be used.

    Empty lines and lines that begin with `#` are no keys. A file that all users of the machine may read is rejected.
    """
    return _keys(flag, path, read_secret_file(flag, path, MAX_KEY_FILE_BYTES))


def _keys(flag: str, path: Path, raw: bytes) -> dict[str, KeyTerms]:
    if not raw.isascii():
        raise SettingsError(f"{flag} {path} has bytes that are not ASCII; a key travels in an HTTP header")
    lines = [line.strip() for line in raw.decode("ascii").splitlines()]
    try:
        pairs = [parse_line(line) for line in lines if line and not line.startswith("#")]
    except ValueError as error:
        raise SettingsError(f"{flag} {path} has a line with {error}") from error
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise SettingsError(f"{flag} {path} has a key twice; give each one line")
    if not keys:
        raise SettingsError(f"{flag} {path} holds no key; write one a line, say from `openssl rand -hex 32`")
    return keys


class RequireKey:
    """ASGI middleware that passes on requests with an accepted key; every other path is closed by default.

    It looks at the path's raw bytes, as they were sent: another spelling of an open path needs the key.
    """

    def __init__(
        self, app: ASGIApp, keys: Admits, *, metrics_without_key: bool = False, page_without_key: bool = False
    ) -> None:
        self._app = app
        self._keys = keys
        also_open = {METRICS: metrics_without_key, PAGE: page_without_key}
        self._open_paths = PROBES | {path for path, is_open in also_open.items() if is_open}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope.get("raw_path") not in self._open_paths:
            key = self._fitting_key(scope)
            if key is None:
                await send_error(scope, send, _unauthorized(scope), [(b"www-authenticate", b"Bearer")])
                return
            scope[KEY], scope[TERMS] = key
        await self._app(scope, receive, send)

    def _fitting_key(self, scope: Scope) -> tuple[bytes, KeyTerms] | None:
        for key in _given_keys(scope):
            if (terms := self._keys.admit(key)) is not None:
                return key, terms
        return None


def _given_keys(scope: Scope) -> Iterator[bytes]:
    """The first of each header: OpenAI's clients send one, Anthropic's the other."""
    scheme, _, key = _header(scope, b"authorization").partition(b" ")
    if scheme.lower() == b"bearer" and len(key) <= MAX_KEY_FILE_BYTES:
        yield key.strip()
    key = _header(scope, b"x-api-key")
    if key and len(key) <= MAX_KEY_FILE_BYTES:
        yield key.strip()


def _header(scope: Scope, wanted: bytes) -> bytes:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    return next((value for name, value in headers if name == wanted), b"")


def _unauthorized(scope: Scope) -> ApiError:
    is_given = any(_header(scope, name) for name in (b"authorization", b"x-api-key"))
    what = "the API key does not fit" if is_given else "no API key was given"
    advice = "send one from the server's key file as `Authorization: Bearer KEY`"
    return ApiError(401, f"{what}; {advice}", code="invalid_api_key")
