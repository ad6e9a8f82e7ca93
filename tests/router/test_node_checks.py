"""The preflight's table: what is found, what to do, and the exit code."""

from __future__ import annotations

import msgspec
import pytest
from plait.nodes.checks import Finding, find_faults, first_cause, table_lines
from plait.nodes.layout import plan_layout
from plait.nodes.messages import Facts, Gpu, Machine, ModelFiles, Versions

GPU = Gpu(name="H200", driver="570", free_bytes=140 << 30)
MODEL = ModelFiles(path="/m", files={"config.json": (10, "ab"), "model.safetensors": (1 << 30, "")})
FACTS = Facts(
    node=0,
    host="a",
    address="10.0.0.1",
    address_reason="the head's",
    session="0",
    versions=Versions(plait="0.1.0", python="3.11.2", torch="2.11"),
    settings={"--tp": "2"},
    model=MODEL,
    machine=Machine(
        gpus=(GPU, GPU),
        free_bytes=64 << 30,
        shm_bytes=8 << 30,
        memlock_bytes=None,
        open_files=65_536,
        taken_ports=(),
    ),
    probe_port=1,
)
LAYOUT = plan_layout(num_nodes=2, tp=2, dp=2, dp_attention=False, gpus_per_node=2)


def changed(**fields: object) -> Facts:
    """Node 1 with these fields of the facts, or of their parts."""
    facts = msgspec.structs.replace(FACTS, node=1, host="b", address="10.0.0.2")
    for name, value in fields.items():
        for part in ("versions", "machine", "model"):
            component = getattr(facts, part)
            if name in component.__struct_fields__:
                facts = msgspec.structs.replace(facts, **{part: msgspec.structs.replace(component, **{name: value})})
        if name in facts.__struct_fields__:
            facts = msgspec.structs.replace(facts, **{name: value})
    return facts


def find(other: Facts, clock: float = 0.0, problem: str | None = None) -> list[Finding]:
    return find_faults([FACTS, other], LAYOUT, {1: clock}, {0: {1: problem}, 1: {0: None}})


def test_nodes_that_are_alike_pass() -> None:
    assert find(changed()) == []
    assert first_cause([FACTS, changed()], []) is None
    assert [line.split()[3:] for line in table_lines([FACTS, changed()], [])][1:] == [["ok"] * 13] * 2


@pytest.mark.parametrize(
    ("fields", "check", "code", "said"),
    [
        ({"plait": "0.2.0"}, "version", 2, "Plait 0.2.0, node 0 has 0.1.0; install the same"),
        ({"torch": ""}, "version", 2, "torch is missing, node 0 has 2.11"),
        ({"python": "3.12.1"}, "version", None, "Python 3.12.1"),
        ({"settings": {"--tp": "2", "--max-seqs": "8"}}, "settings", 2, "--max-seqs is 8, on node 0 the default"),
        ({"settings": {}}, "settings", 2, "--tp is the default, on node 0 2"),
        ({"problem": "there is no folder"}, "model", 4, "there is no folder"),
        ({"files": {"config.json": (10, "ab")}}, "model", 4, "lacks model.safetensors, which node 0 has"),
        ({"files": {**MODEL.files, "a.safetensors": (1, "")}}, "model", 4, "has a.safetensors, which node 0 has not"),
        ({"files": {**MODEL.files, "model.safetensors": (9, "")}}, "model", 4, "has 9 bytes, on node 0 1,073,741,824"),
        ({"files": {**MODEL.files, "config.json": (10, "cd")}}, "model", 4, "config.json in /m differs from node 0's"),
        ({"gpus": (GPU,)}, "gpus", 3, "1 GPUs, 2 ranks"),
        ({"gpus": (msgspec.structs.replace(GPU, name="H100"),) * 2}, "gpus", 3, "H100, node 0 has H200"),
        ({"gpus": (msgspec.structs.replace(GPU, driver="560"),) * 2}, "gpus", None, "driver 560, node 0 has 570"),
        ({"gpus": (GPU, msgspec.structs.replace(GPU, free_bytes=1 << 20))}, "memory", 3, "of memory of a GPU are free"),
        ({"without_peer_access": ((0, 1),)}, "peers", None, "GPUs 0 and 1 cannot read each other's memory"),
        ({"shm_bytes": 64 << 20}, "shm", None, "/dev/shm has 64 MiB"),
        ({"memlock_bytes": 64 << 10}, "memlock", None, "64 KiB may be locked"),
        ({"open_files": 1024}, "files", 3, "1024 open files at most"),
        ({"taken_ports": ("port 8000 on 127.0.0.1 is in use",)}, "ports", 2, "port 8000 on 127.0.0.1 is in use"),
    ],
)
def test_what_differs_or_is_missing_is_named_with_what_to_do(
    fields: dict[str, object], check: str, code: int | None, said: str
) -> None:
    (found,) = find(changed(**fields))
    assert (found.node, found.check, found.code) == (1, check, code)
    assert said in found.text
    lines = list(table_lines([FACTS, changed()], [found]))
    column = lines[0].split().index(check)
    assert [line.split()[column] for line in lines[1:3]] == ["ok", "note" if code is None else "FAIL"]
    assert f"node 1 {check}: " in lines[3]


@pytest.mark.parametrize(("clock", "said"), [(3600.0, "3,600 s ahead of node 0's"), (-90.0, "90 s behind node 0's")])
def test_a_clock_that_is_off_is_named(clock: float, said: str) -> None:
    (found,) = find(changed(), clock)
    assert said in found.text
    assert found.code == 3


def test_gpus_of_a_node_whose_head_has_none_are_named() -> None:
    """Its ranks would compute on GPUs, the head's on the CPU."""
    head = msgspec.structs.replace(FACTS, machine=msgspec.structs.replace(FACTS.machine, gpus=()))
    layout = plan_layout(num_nodes=2, tp=2, dp=2, dp_attention=False, gpus_per_node=0)
    (found,) = find_faults([head, changed()], layout, {}, {})
    assert (found.node, found.check, found.code) == (1, "gpus", 3)
    assert "2 GPUs, node 0 has none; check nvidia-smi there" in found.text


def test_a_pair_is_named_in_the_direction_that_fails() -> None:
    (found,) = find(changed(), problem="no answer within 5 s")
    assert (found.node, found.code) == (0, 5)
    assert "node 1 (10.0.0.2) cannot be reached from here: no answer within 5 s" in found.text


def test_the_cause_is_the_first_failure_and_counts_the_others() -> None:
    other = changed(plait="0.2.0", open_files=10, shm_bytes=0)
    found = find(other)
    cause = first_cause([FACTS, other], found)
    assert cause is not None
    assert cause.code == 2
    assert cause.reason.startswith("preflight: node 1 (b), version: Plait 0.2.0")
    assert cause.reason.endswith("(and 1 more, above)")
