"""The interface of the ranks' own sockets."""

from __future__ import annotations

import pytest
from plait.errors import SettingsError
from plait.launch.rank_interface import VARIABLES, interface_to, set_rank_interface
from plait.settings import GroupMembership


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:7000", "tcp://localhost:7000", "tcp://lo:7000"])
def test_it_is_the_one_from_which_the_group_is_reached(endpoint: str) -> None:
    assert interface_to(endpoint) == "lo"


@pytest.mark.parametrize("endpoint", ["tcp://*:7000", "tcp://0.0.0.0:7000", "tcp://no-such-host.invalid:7000"])
def test_an_address_of_no_host_asks_for_a_name(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"):
        interface_to(endpoint)


def of_group(endpoint: str) -> GroupMembership:
    return GroupMembership(engine=0, num_engines=2, endpoint=endpoint)


def test_the_users_choice_stands() -> None:
    environment = dict.fromkeys(VARIABLES, "eth7")
    set_rank_interface(environment, of_group("tcp://*:7000"), shares_experts=True)
    assert environment == dict.fromkeys(VARIABLES, "eth7")


@pytest.mark.parametrize(
    ("endpoint", "shares_experts"), [("ipc:///run/group", True), ("tcp://*:7000", False), ("tcp://127.0.0.1:1", True)]
)
def test_ranks_that_compute_on_one_host_stay_on_loopback(endpoint: str, shares_experts: bool) -> None:
    environment: dict[str, str] = {}
    set_rank_interface(environment, of_group(endpoint), shares_experts=shares_experts)
    assert environment == dict.fromkeys(VARIABLES, "lo")
