"""The command `plait`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from plait.bench.cli import add_commands, bench
from plait.check_settings import check_model_is_named, check_settings
from plait.config_file import add_config, apply_config
from plait.errors import ADVICE, DONE, SettingsError, StartError
from plait.flags import Parser, add_flags, name_as_typed, read_settings, reject_unknown
from plait.kernels import ACTIONS, KernelsSettings, run_kernels
from plait.log import say_last, write_json_lines
from plait.nodes import cli as nodes
from plait.offline.settings import RunBatchSettings
from plait.output import discard_output
from plait.plan.settings import PlanSettings
from plait.process_environment import prepare_environment
from plait.settings import ChatSettings, ServeSettings
from plait.simulate.settings import SimulateSettings
from plait.top_settings import TopSettings
from plait.version import version

# Tells flashinfer which GPU to compile for; the suffix `a` allows that architecture's own instructions.
_ARCH_VARIABLE = "FLASHINFER_CUDA_ARCH_LIST"


def main() -> NoReturn:
    """Run this process's command line; exits with `ExitCode`."""
    prepare_environment(os.environ)
    sys.exit(run(sys.argv[1:]))


def run(argv: list[str]) -> int:
    """Run one command; the exit code. The last line on standard error says what is wrong and what to do."""
    write_json_lines("--log-json" in argv)  # for what is wrong with other flags
    try:
        return _run(argv)
    except StartError as error:
        say_last(name_as_typed(_last_line(error), ServeSettings, argv))
        return error.exit_code
    except KeyboardInterrupt:  # before the server handles signals itself
        say_last("Stopped", "INFO")
        return DONE
    except BrokenPipeError:
        discard_output()
        return DONE


def _last_line(error: StartError) -> str:
    kind = error.exit_code.name.lower().replace("_", " ")
    advice = ADVICE.get(error.exit_code)
    return f"plait: {kind} error (exit code {error.exit_code}): {error.message}" + (f"; {advice}" if advice else "")


def _run(argv: list[str]) -> int:
    parser, commands = build_arg_parsers()
    args, unknown = parser.parse_known_args(argv)
    if args.command is None:
        raise SettingsError("no command was given; `plait serve` starts a server, `plait --help` lists the commands")
    reject_unknown(commands[_command(args)], unknown)
    return bench(args, argv) if args.command == "bench" else _COMMANDS[args.command](args)


def _command(args: argparse.Namespace) -> str:
    """`serve`, `bench serve` or `keys new`."""
    inner = getattr(args, "bench", None) or getattr(args, "key_action", None)
    return args.command if inner is None else f"{args.command} {inner}"


def build_arg_parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and those of its commands by name."""
    parser = Parser(prog="plait", description="A server for large language models.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"plait {version()}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a model over HTTP on this machine", allow_abbrev=False)
    serve.add_argument(
        "model", metavar="MODEL", nargs="?", help="folder, GGUF file or hub id (default: the demo model)"
    )
    add_config(serve)
    add_flags(serve, ServeSettings)
    made = nodes.add_commands(commands)
    chat = commands.add_parser("chat", help="talk to a running server", allow_abbrev=False)
    add_flags(chat, ChatSettings)
    top = commands.add_parser("top", help="watch a running server", allow_abbrev=False)
    add_flags(top, TopSettings)
    simulate = commands.add_parser("simulate", help="run the scheduler on a trace, in virtual time", allow_abbrev=False)
    add_flags(simulate, SimulateSettings)
    plan = commands.add_parser("plan", help="size a model on paper: memory, requests, rates, flags", allow_abbrev=False)
    plan.add_argument("model", metavar="MODEL", help="folder with a config.json, or the file alone")
    add_flags(plan, PlanSettings)
    batch = commands.add_parser("run-batch", help="answer an OpenAI batch file, without a server", allow_abbrev=False)
    batch.add_argument("batch", metavar="IN", help="batch file: on each line an object with custom_id, url and body")
    batch.add_argument("results", metavar="OUT", help="file of results; one that a stopped run left is gone on with")
    batch.add_argument("model", metavar="MODEL", nargs="?", help="as for serve (default: the demo model)")
    add_flags(batch, RunBatchSettings)
    kernels = commands.add_parser(
        "kernels", help="list a model's GPU modules, or build them before its first start", allow_abbrev=False
    )
    kernels.add_argument("action", choices=ACTIONS, help="list the modules, or compile those that are missing")
    kernels.add_argument("model", metavar="MODEL", nargs="?", help="as for serve (default: the demo model)")
    add_flags(kernels, KernelsSettings)
    load = commands.add_parser("bench", help="load a running server and measure it", allow_abbrev=False)
    benches = {f"bench {name}": command for name, command in add_commands(load).items()}
    made |= {
        "serve": serve,
        "chat": chat,
        "top": top,
        "simulate": simulate,
        "plan": plan,
        "kernels": kernels,
        "bench": load,
    }
    made["run-batch"] = batch
    return parser, {**made, **benches}


def _serve(args: argparse.Namespace) -> int:
    apply_config(args, ServeSettings)
    settings = read_settings(args, ServeSettings)
    write_json_lines(settings.logs.log_json)
    check_settings(settings)
    check_model_is_named(args.model, settings.http.served_model_name or ())
    from plait.launch.serve import serve

    return serve(args.model, settings, os.environ)


def _launch(args: argparse.Namespace) -> int:
    return nodes.launch(args, os.environ)


def _doctor(args: argparse.Namespace) -> int:
    return nodes.doctor(args, os.environ)


def _chat(args: argparse.Namespace) -> int:
    settings = read_settings(args, ChatSettings).talk
    from plait.chat import chat
    from plait.http.auth import read_keys

    key = next(iter(read_keys(Path(settings.api_key_file)))) if settings.api_key_file is not None else None
    return chat(settings.url, key, settings.temperature)


def _top(args: argparse.Namespace) -> int:
    settings = read_settings(args, TopSettings).watch
    from plait.http.auth import read_keys
    from plait.top import top

    key = next(iter(read_keys(Path(settings.api_key_file)))) if settings.api_key_file is not None else None
    return top(settings.url, key, settings.interval, settings.count)


def _simulate(args: argparse.Namespace) -> int:
    settings = read_settings(args, SimulateSettings)
    from plait.simulate.command import simulate

    return simulate(settings)


def _plan(args: argparse.Namespace) -> int:
    settings = read_settings(args, PlanSettings)
    from plait.plan.command import plan

    return plan(args.model, settings)


def _run_batch(args: argparse.Namespace) -> int:
    settings = read_settings(args, RunBatchSettings)
    check_model_is_named(args.model, settings.batch.served_model_name or ())
    from plait.offline.run_batch import run_batch

    return run_batch(Path(args.batch), Path(args.results), args.model, settings, os.environ)


def _kernels(args: argparse.Namespace) -> int:
    settings = read_settings(args, KernelsSettings)
    if settings.need.arch is not None:
        os.environ[_ARCH_VARIABLE] = f"{settings.need.arch.removesuffix('a')}a"
    return run_kernels(args.action, args.model, settings.need)


_COMMANDS = {
    "serve": _serve,
    "launch": _launch,
    "doctor": _doctor,
    "keys": nodes.keys,
    "chat": _chat,
    "top": _top,
    "simulate": _simulate,
    "plan": _plan,
    "run-batch": _run_batch,
    "kernels": _kernels,
}


if __name__ == "__main__":
    main()
