"""Which node this is: the same place from flags and from every launcher's variables, and errors that say what to do."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
from plait.errors import SettingsError
from plait.nodes.environment import HEAD_PORT, read_job
from plait.nodes.launch import launch
from plait.nodes.node_list import expand_node_list
from plait.nodes.place import check_head_address, find_place, own_address, parse_head, resolve_head, with_port
from plait.nodes.settings import LaunchSettings, NodeSettings
from plait.settings import DeviceSettings, ProcessSettings

SRUN = {
    "SLURM_JOB_ID": "1207",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
SBATCH = {
    "SLURM_JOB_ID": "1207",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}
TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "gpu03",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
LWS = {"LWS_LEADER_ADDRESS": "gpu03", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
HEAD = NodeSettings(head="gpu03:7450")


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        (NodeSettings(nnodes=2, node_rank=1, head="gpu03:7450"), {}),
        (HEAD, SRUN),
        (HEAD, OPEN_MPI),
        (NodeSettings(), TORCHRUN),
        (NodeSettings(), LWS),
        (NodeSettings(nnodes=2, node_rank=1), LWS),
        (NodeSettings(nnodes=2, node_rank=1, head="gpu03", launcher="none"), SRUN | LWS),
        (NodeSettings(launcher="lws"), SRUN | LWS),
    ],
)
def test_every_launcher_gives_the_same_place(settings: NodeSettings, environment: dict[str, str]) -> None:
    place = find_place(settings, environment)
    assert (place.num_nodes, place.node, place.head, place.head_port) == (2, 1, "gpu03", HEAD_PORT)


def test_without_flags_and_variables_there_is_one_node() -> None:
    place = find_place(NodeSettings(), {"PATH": "/bin"})
    assert (place.num_nodes, place.node, place.head) == (1, 0, "127.0.0.1")


def test_jobs_of_slurm_that_share_nodes_meet_at_different_ports() -> None:
    ports = {find_place(NodeSettings(), SRUN | {"SLURM_JOB_ID": str(job)}).head_port for job in (1, 2, 599)}
    assert len(ports) == 3
    assert all(1024 < port < 32_768 for port in ports)


def test_the_batch_script_of_a_job_with_one_node_is_that_node() -> None:
    place = read_job(SBATCH | {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "gpu03"})
    assert place is not None
    assert (place.num_nodes, place.node, place.head) == (1, 0, "gpu03")


@pytest.mark.parametrize(
    ("settings", "environment", "said"),
    [
        (NodeSettings(), SBATCH, "start all with `srun --ntasks-per-node=1 plait launch"),
        (NodeSettings(), SRUN | {"SLURM_STEP_NUM_TASKS": "16"}, "starts 16 tasks on 2 nodes"),
        (NodeSettings(), SRUN | {"SLURM_NODEID": "2"}, "node 2 of 2"),
        (NodeSettings(), SRUN | {"SLURM_NODEID": "x"}, "SLURM_NODEID is 'x'"),
        (NodeSettings(), SRUN | LWS, "variables of slurm and lws; say whose count with --launcher"),
        (NodeSettings(), TORCHRUN | OPEN_MPI, "variables of openmpi and torchrun"),
        (NodeSettings(), OPEN_MPI, "openmpi does not say where node 0 runs; give --head"),
        (HEAD, OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "add --map-by ppr:1:node"),
        (NodeSettings(), TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "--nproc-per-node 1"),
        (NodeSettings(), {"LWS_LEADER_ADDRESS": "a", "LWS_WORKER_INDEX": "0"}, "LWS_GROUP_SIZE is not set"),
        (NodeSettings(node_rank=0), LWS, "--node-rank is 0, but lws says 1"),
        (NodeSettings(nnodes=4), LWS, "--nnodes is 4, but lws says 2"),
        (NodeSettings(), LWS | {"LWS_LEADER_ADDRESS": ""}, "lws gives an empty name of the head"),
        (NodeSettings(launcher="slurm"), LWS, "--launcher is slurm, but its environment variables are not set"),
        (NodeSettings(nnodes=2, head="a"), {}, "--nnodes is 2 without --node-rank"),
        (NodeSettings(nnodes=2, node_rank=2, head="a"), {}, "has the nodes 0 to 1"),
        (NodeSettings(nnodes=2, node_rank=1), {}, "give --head HOST:PORT"),
        (NodeSettings(node_rank=1), {}, "--node-rank is 1; --nnodes 1"),
        (NodeSettings(nnodes=2, node_rank=1, head="a:70000"), {}, "a port from 1 to"),
        (NodeSettings(nnodes=2, node_rank=1, head="[gpu03]:70"), {}, "an IPv6 address in brackets"),
    ],
)
def test_a_place_that_cannot_be_is_refused(settings: NodeSettings, environment: dict[str, str], said: str) -> None:
    with pytest.raises(SettingsError) as error:
        find_place(settings, environment)
    assert said in error.value.message


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("gpu03", ("gpu03", HEAD_PORT)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("fd00::1", ("fd00::1", HEAD_PORT)),
        ("[fd00::1]", ("fd00::1", HEAD_PORT)),
        ("[fd00::1]:80", ("fd00::1", 80)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_a_head_may_be_a_name_or_an_address_of_either_kind(text: str, head: tuple[str, int]) -> None:
    assert parse_head(text) == head


@pytest.mark.parametrize("text", ["", ":80", "gpu03:", "gpu03:x", "gpu03:80:90", "[fd00::1", "[fd00::1]80", "[]:80"])
def test_a_head_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="--head is"):
        parse_head(text)


def test_a_head_without_an_address_is_named() -> None:
    place = find_place(NodeSettings(nnodes=2, node_rank=1, head="no-such-host.invalid"), {})
    with pytest.raises(SettingsError, match=r"the head 'no-such-host.invalid' has no address here"):
        resolve_head(place, 0.0)


def test_a_name_of_the_head_that_is_loopback_here_is_refused() -> None:
    place = find_place(NodeSettings(nnodes=2, node_rank=1, head="gpu03"), {})
    check_head_address(place, "10.0.0.3")
    check_head_address(find_place(NodeSettings(nnodes=2, node_rank=0, head="127.0.0.1"), {}), "127.0.0.1")
    with pytest.raises(SettingsError, match=r"'gpu03' is 127.0.1.1 on this node, which no other node reaches"):
        check_head_address(place, "127.0.1.1")


@pytest.mark.parametrize("address", ["0.0.0.0", "::"])
def test_an_address_of_no_host_is_no_heads(address: str) -> None:
    place = find_place(NodeSettings(nnodes=2, node_rank=0, head=address), {})
    with pytest.raises(SettingsError, match="which is no host's"):
        check_head_address(place, address)


def test_this_nodes_address_is_the_one_on_the_way_to_the_head() -> None:
    assert own_address(NodeSettings(), "127.0.0.1")[0] == "127.0.0.1"
    assert own_address(NodeSettings(node_address="10.9.9.9"), "127.0.0.1") == ("10.9.9.9", "--node-address")


def test_an_ipv6_address_with_a_port_has_brackets() -> None:
    assert with_port("fd00::1", 80) == "[fd00::1]:80"
    assert with_port("10.0.0.1", 80) == "10.0.0.1:80"


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("gpu03", ["gpu03"]),
        ("gpu[01-03,07],login", ["gpu01", "gpu02", "gpu03", "gpu07", "login"]),
        ("r[1-2]n[08-09]-ib", ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]),
        ("a,b", ["a", "b"]),
        ("n[099-101]", ["n099", "n100", "n101"]),
    ],
)
def test_slurms_short_node_lists_are_expanded(short: str, hosts: list[str]) -> None:
    assert expand_node_list(short) == hosts


@pytest.mark.parametrize("short", ["", "a,", "a[1", "a]1", "a[1-]", "a[-1]", "a[]", "a[1-99999999]", "[1-64][1-99]"])
def test_other_text_is_no_node_list(short: str) -> None:
    with pytest.raises(SettingsError, match="Slurm's node list"):
        expand_node_list(short)


@pytest.mark.parametrize(
    "environment",
    [
        SRUN | {"SLURM_STEP_NODELIST": "127.0.0.1,127.0.0.2"},
        OPEN_MPI,
        TORCHRUN | {"MASTER_ADDR": "127.0.0.1"},
        LWS | {"LWS_LEADER_ADDRESS": "127.0.0.1"},
    ],
)
def test_a_dry_run_prints_the_same_layout_from_every_launcher(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = NodeSettings(head="127.0.0.1:7450", dry_run=True, gpus_per_node=8)
    process = ProcessSettings(dp=4, tp=4)
    flags = msgspec.structs.replace(nodes, nnodes=2, node_rank=1)
    assert launch("MODEL", LaunchSettings(nodes=flags, process=process), {}) == 0
    wanted = capsys.readouterr().out.splitlines()
    assert launch("MODEL", LaunchSettings(nodes=nodes, process=process), environment) == 0
    said = capsys.readouterr().out.splitlines()
    differing = [(ours, theirs) for ours, theirs in zip(said, wanted, strict=True) if ours != theirs]
    assert [ours.split(" (")[0] for ours, _ in differing] == ["This is node 1"]
    assert sum(line.split()[1:2] == ["1"] for line in said) == 8
    assert "--tp=4 --dp=2 --group-engines=2 --group-engine=1 --group-endpoint=tcp://127.0.0.1:7451" in said[-1]


@pytest.mark.parametrize(
    ("device", "nodes", "said"),
    [
        ("cuda", {"gpus_per_node": 0}, "--gpus-per-node is 0, but --device is cuda"),
        ("auto", {"node_address": "10.0.0.9"}, "--node-address is 10.0.0.9, but node 0 is at 127.0.0.1"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(
    device: Literal["auto", "cuda"], nodes: dict[str, object], said: str
) -> None:
    here = NodeSettings(nnodes=2, node_rank=0, head="127.0.0.1", dry_run=True)
    settings = LaunchSettings(
        nodes=msgspec.structs.replace(here, **nodes),
        device=DeviceSettings(device=device),
        process=ProcessSettings(dp=2),
    )
    with pytest.raises(SettingsError) as error:
        launch("MODEL", settings, {})
    assert said in error.value.message


def test_no_gpus_for_ranks_means_cpus_also_for_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("MODEL", LaunchSettings(nodes=NodeSettings(dry_run=True, gpus_per_node=0)), {}) == 0
    assert "plait serve MODEL --device=cpu" in capsys.readouterr().out
