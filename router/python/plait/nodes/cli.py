"""The commands `plait launch`, `plait doctor` and `plait keys`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from plait.check_settings import check_model_is_named
from plait.config_file import add_config, apply_config
from plait.errors import DONE, SettingsError
from plait.flags import Parser, add_flags, read_settings
from plait.log import write_json_lines
from plait.nodes.doctor import DoctorSettings
from plait.nodes.environment import Environment
from plait.nodes.settings import LaunchSettings, NodeCount
from plait.output import say


def add_commands(commands: Any) -> dict[str, Parser]:
    """Add the commands to argparse's `commands`; their parsers by name."""
    launch = commands.add_parser(
        "launch", help="serve a model on several nodes: run it once on each", allow_abbrev=False
    )
    launch.add_argument("model", metavar="MODEL", nargs="?", help="as for serve; each node reads its own files")
    add_config(launch)
    add_flags(launch, LaunchSettings)
    doctor = commands.add_parser("doctor", help="check whether this machine is fit to serve", allow_abbrev=False)
    doctor.add_argument("model", metavar="MODEL", nargs="?", help="as for serve")
    add_flags(doctor, DoctorSettings)
    keys = commands.add_parser("keys", help="make the keys by which nodes know each other", allow_abbrev=False)
    actions = keys.add_subparsers(dest="key_action", metavar="ACTION", parser_class=Parser)
    new = actions.add_parser("new", help="make a key for each node", allow_abbrev=False)
    new.add_argument("folder", metavar="DIR", help="folder for the files; each node needs public.keys and its own key")
    new.add_argument("--nodes", metavar="N", required=True, help="nodes of the server, 1 to 64")
    return {"launch": launch, "doctor": doctor, "keys": keys, "keys new": new}


def keys(args: argparse.Namespace) -> int:
    """`plait keys new DIR --nodes N`."""
    if args.key_action is None:
        raise SettingsError("no action was given; `plait keys new DIR --nodes N` makes keys")
    from plait.nodes.key_files import write_new_keys

    try:
        num_nodes = msgspec.convert(args.nodes, NodeCount, strict=False)
    except msgspec.ValidationError:
        raise SettingsError(f"--nodes is {args.nodes!r}; allowed: a whole number from 1 to 64") from None
    public, *secret = write_new_keys(Path(args.folder), num_nodes)
    say(f"{public}: public keys of all nodes; each node needs a copy")
    for node, file in enumerate(secret):
        say(f"{file}: secret key of node {node}; copy it to that node alone, with mode 0600")
    return DONE


def launch(args: argparse.Namespace, environment: Environment) -> int:
    """`plait launch [MODEL]`."""
    apply_config(args, LaunchSettings)
    settings = read_settings(args, LaunchSettings)
    write_json_lines(settings.logs.log_json)
    check_model_is_named(args.model, settings.http.served_model_name or ())
    from plait.nodes.launch import launch as run

    return run(args.model, settings, environment)


def doctor(args: argparse.Namespace, environment: Environment) -> int:
    """`plait doctor [MODEL]`."""
    needs = read_settings(args, DoctorSettings).needs
    from plait.nodes.doctor import doctor as run

    return run(args.model, needs, environment)
