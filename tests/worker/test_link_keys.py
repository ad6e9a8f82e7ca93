"""CURVE on a rank's link: the file of keys, and what a rank says of a handshake that fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from plait_proto import ExitCode
from plait_worker.errors import WorkerError
from plait_worker.link import Link
from plait_worker.link_keys import LinkKeys, read_keys
from zmq.auth.thread import ThreadAuthenticator

SERVER, OWN, OTHER = (tuple(key.decode() for key in zmq.curve_keypair()) for _ in range(3))
"""Public and secret."""


@pytest.fixture
def engine() -> Iterator[zmq.Socket[bytes]]:
    """An engine's socket; it admits the key `OWN` alone."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    allowlist = ThreadAuthenticator(context)
    allowlist.start()
    allowlist.configure_curve_callback("*", Listed())
    socket = context.socket(zmq.ROUTER)
    socket.linger = 0
    socket.curve_server = True
    socket.curve_secretkey = SERVER[1].encode()
    socket.bind("tcp://127.0.0.1:*")
    yield socket
    socket.close()
    allowlist.stop()
    context.term()


class Listed:
    """Answers who may connect."""

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == OWN[0].encode()


def dial(engine: zmq.Socket[bytes], keys: LinkKeys) -> Link:
    return Link(engine.get_string(zmq.LAST_ENDPOINT), 3, keys)


def test_a_listed_key_brings_a_rank_to_its_engine(engine: zmq.Socket[bytes]) -> None:
    link = dial(engine, LinkKeys(SERVER[0], *OWN))
    link.send([b"hello"])
    assert engine.recv_multipart() == [b"rank-3", b"hello"]
    link.close()


@pytest.mark.parametrize(
    ("keys", "code", "said"),
    [
        (LinkKeys(SERVER[0], *OTHER), ExitCode.SETTINGS, "refuses this host's key"),
        (LinkKeys(OTHER[0], *OWN), ExitCode.RANK_LOST, "its key is not that of --keys"),
    ],
)
def test_a_rank_with_a_wrong_key_says_so(engine: zmq.Socket[bytes], keys: LinkKeys, code: ExitCode, said: str) -> None:
    link = dial(engine, keys)
    link.send([b"hello"])
    with pytest.raises(WorkerError) as failure:
        link.welcome()
    link.close()
    assert (failure.value.code, said in failure.value.reason) == (code, True), failure.value.reason


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        ({"server": SERVER[0], "public": OWN[0], "secret": OWN[1]}, 0o644, "chmod 600"),
        ({"server": SERVER[0], "public": OWN[0]}, 0o600, "give server, public and secret"),
        (None, 0o600, "give server, public and secret"),
    ],
)
def test_a_file_of_keys_is_whole_and_its_owners_alone(
    content: dict[str, str] | None, mode: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "keys.json"
    if content is not None:
        path.write_text(json.dumps(content))
        path.chmod(mode)
    with pytest.raises(WorkerError) as failure:
        read_keys(path)
    assert failure.value.code is ExitCode.SETTINGS
    assert said in failure.value.reason


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(WorkerError, match="not three CURVE keys"):
        Link("tcp://127.0.0.1:1", 0, LinkKeys("short", "short", "short"))
