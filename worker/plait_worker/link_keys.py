"""CURVE on the link of a rank whose engine is on another host: its keys, and why a handshake failed."""

from __future__ import annotations

import stat
from pathlib import Path

import msgspec
import zmq
from plait_proto import UNDECODABLE, ExitCode
from plait_proto.silent_links import SILENT_LINK_OPTIONS
from zmq.utils.monitor import parse_monitor_message

from plait_worker.errors import EngineError, WorkerError

MAX_BYTES = 4096
HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_SEND_MILLISECONDS = 500


class LinkKeys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of ``--keys``: CURVE keys in Z85, 40 characters each."""

    server: str
    """The engine's public key."""
    public: str
    secret: str

    def set_on(self, socket: zmq.Socket[bytes]) -> None:
        """Have the socket use them. Raises ``WorkerError`` if they are none."""
        try:
            socket.curve_serverkey = self.server.encode()
            socket.curve_publickey = self.public.encode()
            socket.curve_secretkey = self.secret.encode()
        except (zmq.ZMQError, ValueError) as error:
            raise WorkerError(
                ExitCode.SETTINGS, "--keys: not three CURVE keys in Z85; take those of `plait keys new`"
            ) from error
        socket.ipv6 = True
        socket.sndtimeo = _SEND_MILLISECONDS
        for option, value in SILENT_LINK_OPTIONS.items():
            setattr(socket, option, value)


def read_keys(path: Path) -> LinkKeys:
    """The keys of a file that is its owner's only. Raises ``WorkerError`` if it is not, or cannot be read."""
    try:
        mode, raw = path.stat().st_mode, path.read_bytes()
        keys = msgspec.json.decode(raw[:MAX_BYTES], type=LinkKeys)
    except (OSError, *UNDECODABLE) as error:
        raise WorkerError(ExitCode.SETTINGS, f"--keys {path}: {error}; give server, public and secret") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise WorkerError(ExitCode.SETTINGS, f"--keys {path} is open to other users; run `chmod 600 {path}`")
    return keys


def why_ended(monitor: zmq.Socket[bytes]) -> EngineError:
    """Why the link ended, from its next event, if there is one."""
    if not monitor.poll(0):
        return EngineError(ExitCode.RANK_LOST, "the engine takes no messages any more")
    event = int(parse_monitor_message(monitor.recv_multipart())["event"])
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return EngineError(ExitCode.SETTINGS, "the engine refuses this host's key: it is not listed for this rank")
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return EngineError(ExitCode.SETTINGS, "the engine's key is not the one in the file of --keys")
    if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
        return EngineError(
            ExitCode.RANK_LOST, "the engine hung up in the handshake: it ended, or its key is not that of --keys"
        )
    return EngineError(ExitCode.RANK_LOST, "the engine closed the link")
