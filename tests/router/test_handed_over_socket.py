"""A socket that systemd hands over: `plait.socket`."""

from __future__ import annotations

import os
import socket

import pytest
from plait.errors import SettingsError
from plait.launch.listen import handed_over, url
from plait.nodes.launch import launch
from plait.nodes.settings import LaunchSettings


def told(num: str = "1", pid: int | None = None) -> dict[str, str]:
    """What systemd writes into the environment of a process."""
    return {"LISTEN_PID": str(os.getpid() if pid is None else pid), "LISTEN_FDS": num, "LISTEN_FDNAMES": "plait.socket"}


def test_it_is_taken_and_children_hear_nothing_of_it() -> None:
    environment = told() | {"HOME": "/"}
    held = socket.create_server(("127.0.0.1", 0))
    expected = url(held)
    with handed_over(environment, has_keys=False, first_fd=held.detach()) as taken:  # type: ignore[union-attr]
        assert url(taken) == expected
        assert not taken.get_inheritable()
    assert environment == {"HOME": "/"}


@pytest.mark.parametrize("environment", [{}, told(pid=os.getpid() + 1), {"LISTEN_FDS": "1"}])
def test_none_is_there_for_another_process(environment: dict[str, str]) -> None:
    before = dict(environment)
    assert handed_over(environment, has_keys=False) is None
    assert environment == before


@pytest.mark.parametrize("num", ["0", "2", ""])
def test_one_is_wanted(num: str) -> None:
    with pytest.raises(SettingsError, match="plait serve takes one; give one ListenStream="):
        handed_over(told(num), has_keys=True)


def test_an_address_that_others_reach_needs_keys() -> None:
    held = socket.create_server(("0.0.0.0", 0))
    with pytest.raises(SettingsError, match=r"systemd listens on 0\.0\.0\.0 port .*--api-key-file"):
        handed_over(told(), has_keys=False, first_fd=held.detach())
    held = socket.create_server(("0.0.0.0", 0))
    taken = handed_over(told(), has_keys=True, first_fd=held.detach())
    assert taken is not None
    taken.close()


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_another_kind_of_socket_is_refused(family: socket.AddressFamily) -> None:
    held = socket.socket(family, socket.SOCK_DGRAM)
    with pytest.raises(SettingsError, match="is not TCP; give ListenStream= a port"):
        handed_over(told(), has_keys=True, first_fd=held.detach())


def test_plait_launch_takes_none() -> None:
    with pytest.raises(SettingsError, match=r"plait launch opens its ports itself; run `systemctl disable --now`"):
        launch("MODEL", LaunchSettings(), told())
