"""An engine of a group, as its launcher starts it: `python grouped_engine.py PLACE MODEL FLAGS`, PLACE in JSON."""

from __future__ import annotations

import sys

import msgspec
from plait.errors import StartError
from plait.flags import Parser, add_flags, read_settings
from plait.launch.serve import serve
from plait.settings import GroupMembership, ServeSettings


def main() -> int:
    """The exit code of the engine."""
    parser = Parser(prog="grouped_engine")
    parser.add_argument("place")
    parser.add_argument("model")
    add_flags(parser, ServeSettings)
    typed = parser.parse_args()
    try:
        place = msgspec.json.decode(typed.place, type=GroupMembership)
        return serve(typed.model, read_settings(typed, ServeSettings), place)
    except StartError as error:
        print(f"{error.message} (exit code {error.exit_code})", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
