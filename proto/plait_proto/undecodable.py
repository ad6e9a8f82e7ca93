"""What msgspec raises for bytes that are not what was asked for: texts that are not UTF-8 and deep nesting, too."""

from __future__ import annotations

import msgspec

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
