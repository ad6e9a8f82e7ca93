"""Which rank runs where."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from plait.cli import build_arg_parsers
from plait.errors import SettingsError
from plait.flags import read_settings
from plait.nodes.engine_words import engine_settings_of, engine_words
from plait.nodes.layout import Layout, layout_lines, link_warning, listeners, plan_layout
from plait.nodes.settings import LaunchSettings, NodeSettings
from plait.settings import (
    GroupSettings,
    HostSettings,
    HttpSettings,
    ProcessSettings,
    RestartSettings,
    SchedulerSettings,
    ServeSettings,
)


def layout(num_nodes: int = 2, tp: int = 2, dp: int = 2, gpus_per_node: int = 0) -> Layout:
    return plan_layout(num_nodes=num_nodes, tp=tp, dp=dp, dp_attention=False, gpus_per_node=gpus_per_node)


@given(num_nodes=st.integers(1, 8), tp=st.integers(1, 8), each=st.integers(1, 8), has_gpus=st.booleans())
def test_replicas_are_whole_on_a_node_and_each_rank_has_a_gpu_of_its_own(
    num_nodes: int, tp: int, each: int, has_gpus: bool
) -> None:
    planned = layout(num_nodes, tp, num_nodes * each, tp * each if has_gpus else 0)
    ranks = list(planned.ranks())
    assert [one.rank for one in ranks] == list(range(num_nodes * each * tp))
    nodes_of = {replica: {one.node for one in ranks if one.replica == replica} for replica in range(num_nodes * each)}
    assert all(len(nodes) == 1 for nodes in nodes_of.values())
    assert all(list(planned.ranks_of(one.node)).index(one.rank) == one.local_rank for one in ranks)
    assert len({(one.node, one.gpu) for one in ranks}) == (len(ranks) if has_gpus else num_nodes)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"dp": 1, "tp": 3}, "--dp 1 times --tp 3 are 3 ranks on 2 nodes; each node takes equally many: give --dp 2"),
        ({"dp": 3, "tp": 1}, "give --dp 4"),
        ({"dp": 4, "gpus_per_node": 2}, "put 4 ranks on a node, which has 2 GPUs"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(words: dict[str, int], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        layout(**words)
    assert said in error.value.message


def test_the_table_names_node_device_and_replica_of_each_rank_and_each_port() -> None:
    planned = layout(gpus_per_node=8)
    lines = list(layout_lines(planned, list(listeners(planned, "fd00::1", 7450, {"HTTP": ("127.0.0.1", 8000)}))))
    assert lines[0] == "2 nodes, 4 ranks: 2 replicas of the whole model, 2 ranks each"
    assert [line.split() for line in lines[2:6]] == [
        ["0", "0", "gpu", "0", "0"],
        ["1", "0", "gpu", "1", "0"],
        ["2", "1", "gpu", "0", "1"],
        ["3", "1", "gpu", "1", "1"],
    ]
    assert "[fd00::1]:7450  node 0: the nodes' launchers meet" in lines[6]
    assert "[fd00::1]:7451  node 0: the engines vote" in lines[7]
    assert "127.0.0.1:8000" in lines[8]


@given(num_nodes=st.integers(2, 8), tp=st.integers(1, 16), dp=st.integers(1, 8))
def test_ranks_of_a_replica_may_be_on_several_nodes_in_order(num_nodes: int, tp: int, dp: int) -> None:
    assume(dp % num_nodes and dp * tp % num_nodes == 0)
    planned = layout(num_nodes, tp, dp, gpus_per_node=dp * tp // num_nodes)
    ranks = list(planned.ranks())
    assert planned.spans_nodes
    assert [one.node for one in ranks] == [one.rank // planned.ranks_per_node for one in ranks]
    assert all(planned.node_of(one.rank) == one.node for one in ranks)
    assert len({(one.node, one.gpu) for one in ranks}) == len(ranks)
    split = {one.replica for one in ranks} - {
        replica for replica in range(dp) if len({one.node for one in ranks if one.replica == replica}) == 1
    }
    assert set(planned.split_replicas()) == split
    remote = {one.replica for one in ranks if one.node > 0}
    assert set(planned.replicas_with_remote_ranks()) == remote


def test_the_only_engine_gets_all_replicas_and_the_hosts_of_its_ranks() -> None:
    given = LaunchSettings(nodes=NodeSettings(keys="/keys"), process=ProcessSettings(tp=2))
    planned = layout(dp=1)
    words = engine_words("MODEL", engine_settings_of(given, planned, 0, "10.0.0.1", 7450))
    assert words == [
        *("serve", "MODEL", "--tp=2", "--rank-hosts=2", "--rank-endpoint=tcp://10.0.0.1:7451"),
        *("--rank-secret-key-file=/keys/node-0.key", "--rank-public-keys-file=/keys/public.keys"),
    ]
    ports = [(one.node, one.port) for one in listeners(planned, "10.0.0.1", 7450, {"HTTP": ("127.0.0.1", 8000)})]
    assert ports == [(0, 7450), (0, 7451), (0, 8000)]


def test_tensor_parallelism_over_nodes_is_warned_of_with_the_link() -> None:
    assert "replica 0 has ranks on several nodes: two all-reduces a layer cross eth0" in link_warning(
        layout(dp=1), "eth0"
    )
    assert link_warning(layout(), "eth0") == ""


def test_experts_are_not_shared_by_ranks_of_one_engine_on_several_nodes() -> None:
    with pytest.raises(SettingsError, match="with --dp-attention each node takes equally many whole replicas"):
        plan_layout(num_nodes=2, tp=2, dp=1, dp_attention=True, gpus_per_node=0)


def test_one_node_opens_no_port_for_others() -> None:
    planned = layout(num_nodes=1)
    assert [one.port for one in listeners(planned, "127.0.0.1", 7450, {"HTTP": ("127.0.0.1", 8000)})] == [8000]


def test_an_engine_gets_its_share_of_the_replicas_and_its_place_in_the_group() -> None:
    given = LaunchSettings(
        nodes=NodeSettings(keys="/keys"),
        process=ProcessSettings(dp=4, tp=2),
        scheduler=SchedulerSettings(max_seqs=7, mixed=False),
    )
    settings = engine_settings_of(given, layout(dp=4), 1, "10.0.0.1", 7450)
    words = engine_words("MODEL", settings)
    assert words == [
        *("serve", "MODEL", "--max-seqs=7", "--no-mixed", "--tp=2", "--dp=2", "--group-engines=2", "--group-engine=1"),
        "--group-endpoint=tcp://10.0.0.1:7451",
        *("--group-secret-key-file=/keys/node-1.key", "--group-public-keys-file=/keys/public.keys"),
    ]
    parser, _ = build_arg_parsers()
    assert read_settings(parser.parse_args(words), ServeSettings) == settings


@pytest.mark.parametrize("names", [("mine",), ("mine", "yours")])
def test_an_engine_gets_every_name_of_the_model(names: tuple[str, ...]) -> None:
    settings = ServeSettings(http=HttpSettings(served_model_name=names))
    parser, _ = build_arg_parsers()
    given = parser.parse_args(engine_words("MODEL", settings))
    assert given.model == "MODEL"
    assert read_settings(given, ServeSettings) == settings


def test_plait_launch_takes_every_setting_of_plait_serve_but_those_that_it_sets() -> None:
    of_launch = {field.type for field in msgspec.structs.fields(LaunchSettings)}
    of_serve = {field.type for field in msgspec.structs.fields(ServeSettings)}
    # Restarts have flags of their own: all nodes meet again.
    assert of_serve - of_launch == {GroupSettings, HostSettings, RestartSettings}


def test_the_launcher_checks_the_port_of_each_door_that_is_opened() -> None:
    doors = {"HTTP": ("127.0.0.1", 8000), "admin listener": ("127.0.0.1", 9000)}
    lines = list(layout_lines(layout(num_nodes=1), list(listeners(layout(num_nodes=1), "127.0.0.1", 7450, doors))))
    assert lines[-2:] == [
        "  127.0.0.1:8000  each node: HTTP of each node's engine",
        "  127.0.0.1:9000  each node: admin listener of each node's engine",
    ]


def test_one_node_needs_no_group() -> None:
    settings = engine_settings_of(LaunchSettings(), layout(num_nodes=1, tp=1, dp=1), 0, "127.0.0.1", 7450)
    assert engine_words(None, settings) == ["serve"]
