"""Authenticated sockets between the nodes' launchers: ZeroMQ with CURVE, and a list of the keys that may connect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import zmq
import zmq.asyncio
from plait_proto.silent_links import SILENT_LINK_OPTIONS
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from plait.errors import SettingsError
from plait.nodes.key_files import NodeKeys
from plait.nodes.place import with_port

MAX_MESSAGE_BYTES = 4 << 20
HIGH_WATER_MARK = 4096
LINGER_MILLIS = 500
"""Time for what a closing socket has still to send."""
RECONNECT_MILLIS = 200
MAX_ENDS = 3
"""Connections in a row that a head ends before the handshake is through: it is not one, or has another key."""
_ZAP = "inproc://zeromq.zap.01"
_ENDED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_WATCHED = _ENDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_DESCRIPTOR = "__fd"
"""The property of a frame that says by which of this process's descriptors it came."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One of a listener's peers."""

    name: bytes
    descriptor: int
    """The monitor names a closed connection by it alone."""


class Allowlist:
    """Answers libzmq's question who may connect (ZAP): the keys of nodes, each as its node."""

    def __init__(self, context: zmq.asyncio.Context, nodes: Mapping[bytes, int]) -> None:
        self._nodes = nodes
        self.refused: list[str] = []
        """Addresses of peers whose key is not listed, each once."""
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(_ZAP)
        self._task = asyncio.get_running_loop().create_task(self._answer())

    async def _answer(self) -> None:
        while True:
            version, request, _, address, _, _, *credentials = await self._socket.recv_multipart()
            node = self._nodes.get(z85.encode(credentials[0])) if credentials else None
            if (
                node is None
                and (text := address.decode(errors="replace").removeprefix("::ffff:")) not in self.refused[-64:]
            ):
                self.refused.append(text)
            decision = [b"400", b"this key is not listed", b""] if node is None else [b"200", b"", str(node).encode()]
            await self._socket.send_multipart([version, request, *decision, b""])

    def close(self) -> None:
        self._task.cancel()
        self._socket.close()


class Listener:
    """The end that others connect to. It admits the nodes of `keys` other than `node`."""

    def __init__(self, keys: NodeKeys, node: int, address: str, port: int) -> None:
        """Listen. Raises `OSError` if the port is taken or the address not this machine's."""
        self._context = zmq.asyncio.Context()
        others = {key: number for number, key in enumerate(keys.public) if number != node}
        self.allowlist = Allowlist(self._context, others)
        self._socket = _configured(self._context.socket(zmq.ROUTER))
        self._socket.router_mandatory = 1
        self._socket.curve_server = 1
        self._socket.curve_secretkey = keys.secret
        self.num_strangers = 0
        """Connections that ended in the handshake: of peers that hold another key of this node, or are no Plait."""
        self._on_closed: Callable[[int], None] | None = None
        self._monitor = self._socket.get_monitor_socket(_ENDED | zmq.EVENT_DISCONNECTED)
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        try:
            self._socket.bind(f"tcp://{with_port(address, port or '*')}")
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror) from error

    @property
    def port(self) -> int:
        """The port, also if it was to be any free one."""
        bound = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(bound, bytes)
        return int(bound.rstrip(b"\0").rpartition(b":")[2])

    def on_closed(self, call: Callable[[int], None]) -> None:
        """Have `call` told the descriptor of each connection that closes. What it sent may still be on its way."""
        self._on_closed = call

    async def _watch(self) -> None:
        while True:
            event = await recv_monitor_message(self._monitor)
            if event["event"] & _ENDED:
                self.num_strangers += 1
            elif self._on_closed is not None:
                self._on_closed(int(event["value"]))

    async def receive(self) -> tuple[int, Connection, bytes]:
        """A message: the node whose key the peer has, the connection, the content."""
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            if len(frames) == 2:
                connection = Connection(frames[0].bytes, int(frames[0].get(_DESCRIPTOR)))
                return int(frames[0].get("User-Id")), connection, frames[1].bytes

    def send(self, connection: Connection, content: bytes) -> None:
        """Send, if the connection is still there."""
        _send_at_once(self._socket, connection.name, content)

    def close(self) -> None:
        self.allowlist.close()
        self._watching.cancel()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class Dialler:
    """The end that connects to `server`, a node's number."""

    def __init__(self, keys: NodeKeys, node: int, server: int, address: str, port: int) -> None:
        self._context = zmq.asyncio.Context()
        self._where = with_port(address, port)
        self._server = server
        self._socket = _configured(self._context.socket(zmq.DEALER))
        self._socket.reconnect_ivl = RECONNECT_MILLIS
        self._socket.curve_serverkey = keys.public[server]
        self._socket.curve_publickey = keys.public[node]
        self._socket.curve_secretkey = keys.secret
        self.num_closed = 0
        """Links that have closed, as far as a task that watches has seen. ZeroMQ makes another one each time."""
        self._monitor = self._socket.get_monitor_socket(_WATCHED)
        self._socket.connect(f"tcp://{self._where}")

    async def receive(self) -> bytes:
        content: bytes = await self._socket.recv()
        return content

    def send(self, content: bytes) -> None:
        """Queue a message; a full queue drops it."""
        _send_at_once(self._socket, content)

    async def watch(self) -> None:
        """Returns never. Raises `SettingsError` if the other end refuses this node's key or has another than listed."""
        num_ends = 0
        while True:
            event = (await recv_monitor_message(self._monitor))["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self.num_closed += 1
                continue
            num_ends = num_ends + 1 if event & _ENDED else 0
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise SettingsError(
                    f"node {self._server} at {self._where} refuses this node's key; copy public.keys and this node's "
                    "key from one `plait keys new`"
                )
            if num_ends >= MAX_ENDS:
                raise SettingsError(
                    f"node {self._server} at {self._where} does not have the key in line {self._server + 1} of "
                    "public.keys, or is no Plait; copy the files of one `plait keys new`, and check --head"
                )

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()

    def __enter__(self) -> Dialler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _configured(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    socket.linger = LINGER_MILLIS
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES
    socket.ipv6 = True
    socket.handshake_ivl = 5000
    for option, value in SILENT_LINK_OPTIONS.items():
        setattr(socket, option, value)
    return socket


def _send_at_once(socket: zmq.asyncio.Socket, *frames: bytes) -> None:
    """Send, or drop what cannot be sent now.

    Not by another handle of the socket: its send would take the notice that a message has come, and `receive` would
    wait for ever.
    """
    sent = socket.send_multipart(frames, zmq.DONTWAIT)
    assert isinstance(sent, asyncio.Future)
    sent.exception()  # it is done, and asyncio warns of errors that nobody looked at
