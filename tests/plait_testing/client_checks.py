"""What the programs of `bench/http/clients` share: each runs in its client's own environment, beside a server.

    PYTHONPATH=tests VENV/bin/python tests/bench/http/clients/with_NAME.py URL MODEL_FOLDER

It prints one line of JSON: the packages' versions, and of each check what was wrong or null.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

MODEL = "recall-gqa"
ASK: list[dict[str, Any]] = [{"role": "user", "content": "copy kilo"}]
DRAWN: dict[str, Any] = {"seed": 1, "temperature": 100}
"""Any token that may come is as likely, so that white space ends soon."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"kind": {"enum": ["create", "delete"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "note", "description": "Note it.", "parameters": SCHEMA}

Checks = dict[str, Callable[[], None]]


def equal(found: object, expected: object) -> None:
    """Raises `AssertionError` if they differ."""
    if found != expected:
        raise AssertionError(f"{found!r}, where {expected!r} is right")


def check_kind(text: str) -> None:
    """Raises `AssertionError` if a text is not JSON of `SCHEMA`."""
    value = json.loads(text)
    if list(value) != ["kind"] or value["kind"] not in SCHEMA["properties"]["kind"]["enum"]:
        raise AssertionError(f"{text} has not the form that was asked for")


def report(packages: Iterable[str], checks: Checks) -> None:
    """Run all checks and print what they found."""
    found = {name: _wrong(check) for name, check in checks.items()}
    print(json.dumps({"versions": {package: version(package) for package in packages}, "checks": found}))


def _wrong(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception as error:  # noqa: BLE001 a client raises what it likes, and the other checks go on
        traceback.print_exc(file=sys.stderr)
        return f"{type(error).__name__}: {error}"[:500]
    return None
