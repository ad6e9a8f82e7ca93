"""``python -m plait_worker --connect ENDPOINT --rank R --config FILE``: one rank, started by the engine's side.

``python -m plait_worker --spare PID`` reads these arguments from standard input instead, once a rank is lost.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq
from plait_kernels import nvrtc
from plait_proto import UNDECODABLE, Bye, ExitCode, Fail, WorkerConfig, decode_config, encode

from plait_worker.errors import EngineError, WorkerError, first_line, is_out_of_memory
from plait_worker.link import Link
from plait_worker.link_keys import read_keys
from plait_worker.loop import run
from plait_worker.machine import die_with_parent
from plait_worker.rendezvous import forbid_multicast
from plait_worker.spare import wait_for_arguments
from plait_worker.start import start
from plait_worker.step_profile import open_profiler

_log = logging.getLogger("plait_worker")


def main() -> int:
    """Serve until the engine drains; the exit code says how it ended."""
    words = sys.argv[1:]
    if words[:1] == ["--spare"]:
        words = wait_for_arguments(int(words[1]))
        if not words:
            return 0
    arguments = _arguments(words)
    forbid_multicast()
    # Ctrl-C reaches the whole terminal; when to stop is the engine's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The server asks a rank that hangs where its threads are.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    logging.basicConfig(
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s rank {arguments.rank}: %(message)s",
        level=logging.INFO,
    )
    nvrtc.CACHE.keep_in(arguments.kernel_cache)
    try:
        die_with_parent(arguments.parent)
        keys = read_keys(arguments.keys) if arguments.keys is not None else None
        link = Link(arguments.connect, arguments.rank, keys)
    except WorkerError as failure:
        return _end(failure.code, failure.reason)
    except ProcessLookupError as gone:
        return _end(ExitCode.RANK_LOST, str(gone))
    except zmq.ZMQError as error:
        return _end(
            ExitCode.SETTINGS, f"--connect {arguments.connect}: {error}; give a ZeroMQ address such as ipc:///run/x"
        )
    code = _serve(link, arguments)
    link.close()
    return code


def _serve(link: Link, arguments: argparse.Namespace) -> int:
    rank: int = arguments.rank
    try:
        config, raw = _read_config(arguments.config)
        if arguments.model is not None:
            config = msgspec.structs.replace(config, model=str(arguments.model))
        logging.getLogger().setLevel(config.log_level.upper())
        profiler = open_profiler(config, rank)
        ready = start(link, config, raw, rank)
        if ready is None:
            _log.info("drained before the first step")
            link.send(encode(Bye(rank=rank, num_steps=0)))
        else:
            run(link, ready, profiler)
    except EngineError as failure:
        return _end(failure.code, failure.reason)
    except WorkerError as failure:
        return _fail(link, rank, failure.code, failure.reason)
    except Exception as error:  # noqa: BLE001 (the process ends here, and says why)
        # The process's edge: whatever went wrong, the engine learns it before the process is gone.
        if is_out_of_memory(error):
            reason = f"out of memory: {first_line(error)}; free memory, or lower --num-pages or --max-batch-tokens"
            return _fail(link, rank, ExitCode.HARDWARE, reason)
        _log.exception("a bug ended this rank")
        return _fail(link, rank, ExitCode.BUG, f"{type(error).__name__}: {error}")
    return 0


def _read_config(path: Path) -> tuple[WorkerConfig, bytes]:
    try:
        raw = path.read_bytes()
        return decode_config(raw), raw
    except (OSError, *UNDECODABLE) as error:
        raise WorkerError(
            ExitCode.SETTINGS, f"--config {path}: {error}; give the file that the engine wrote"
        ) from error


def _fail(link: Link, rank: int, code: ExitCode, reason: str) -> int:
    link.send(encode(Fail(rank=rank, code=code, reason=reason)))
    return _end(code, reason)


def _end(code: ExitCode, reason: str) -> int:
    _log.error("%s (exit code %d)", reason, code)
    return int(code)


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m plait_worker", description=__doc__, allow_abbrev=False)
    parser.add_argument("--connect", required=True, metavar="ENDPOINT", help="address that the engine listens on")
    parser.add_argument("--rank", required=True, type=int, metavar="R", help="this worker's place in the replica")
    parser.add_argument("--config", required=True, type=Path, metavar="FILE", help="configuration, as JSON")
    parser.add_argument("--keys", type=Path, metavar="FILE", help="CURVE keys of a rank on another host, as JSON")
    parser.add_argument("--model", type=Path, metavar="PATH", help="this host's copy of the model")
    parser.add_argument("--kernel-cache", type=Path, metavar="DIR", help="folder for compiled CUDA kernels")
    parser.add_argument("--parent", type=int, metavar="PID", help="the process without which this one ends")
    return parser.parse_args(words)


def exit_now(code: int) -> NoReturn:
    """End this process without the interpreter's own end: NCCL's waits there for ranks that may be gone."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
