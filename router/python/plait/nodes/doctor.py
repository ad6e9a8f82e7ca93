"""`plait doctor`: the preflight of this machine alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

import msgspec
from plait_proto import ExitCode

from plait.errors import DONE, StartError
from plait.nodes.checks import CHECKS, Finding, find_faults, first_cause
from plait.nodes.facts import collect_facts, find_gpus
from plait.nodes.layout import plan_layout
from plait.nodes.link_rates import links_line
from plait.nodes.messages import Facts
from plait.nodes.settings import LaunchSettings
from plait.output import say
from plait.setting import Setting
from plait.settings import HttpSettings, Port, ProcessSettings, RankCount, ReplicaCount

OF_SEVERAL_NODES = ("settings", "clock", "pairs", "reduce")
"""Checks that compare nodes."""


class DoctorNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine should do."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], Setting("device that computes; auto takes a GPU if there is one")
    ] = "auto"
    tp: Annotated[RankCount, Setting("ranks of each replica here", ("--tensor-parallel-size", "--tp-size"))] = (
        ProcessSettings().tp
    )
    dp: Annotated[ReplicaCount, Setting("replicas here", ("--data-parallel-size", "--dp-size"))] = ProcessSettings().dp
    host: Annotated[str, Setting("address to listen on")] = HttpSettings().host
    port: Annotated[Port, Setting("TCP port to listen on; 0: any")] = HttpSettings().port


class DoctorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `plait doctor`."""

    needs: DoctorNeeds = DoctorNeeds()


def doctor(model: str | None, needs: DoctorNeeds, environment: Mapping[str, str]) -> int:
    """Check this machine and say what was found; the exit code. Raises `StartError` for the first failure."""
    gpus = () if needs.device == "cpu" else find_gpus(environment.get("CUDA_VISIBLE_DEVICES"))
    if needs.device == "cuda" and not gpus:
        raise StartError("--device is cuda, but nvidia-smi names no GPU here; check the driver", ExitCode.HARDWARE)
    layout = plan_layout(num_nodes=1, tp=needs.tp, dp=needs.dp, dp_attention=False, gpus_per_node=len(gpus))
    facts = collect_facts(
        node=0,
        address=needs.host,
        address_reason="--host",
        model=model,
        settings=LaunchSettings(),
        gpus=gpus,
        ports=[(needs.host, needs.port)],
        probe_port=0,
    )
    found = find_faults([facts], layout, {}, {})
    for line in doctor_lines(facts, found):
        say(line)
    if len(gpus) > 1:
        say(links_line(len(gpus)))
    if cause := first_cause([facts], found):
        raise StartError(cause.reason, ExitCode(cause.code))
    say("This machine is fit to serve")
    return DONE


def doctor_lines(facts: Facts, found: list[Finding]) -> Iterator[str]:
    """A line a check: what is there, and what is wrong with it."""
    values = _values(facts)
    for check in CHECKS:
        if check not in OF_SEVERAL_NODES:
            own = [one for one in found if one.check == check]
            state = "FAIL" if any(one.code is not None for one in own) else "note" if own else "ok"
            yield f"  {check:<8} {state:<5} {'; '.join(one.text for one in own) or values[check]}"


def _values(facts: Facts) -> dict[str, str]:
    machine, versions = facts.machine, facts.versions
    memlock = "no limit" if machine.memlock_bytes is None else f"{machine.memlock_bytes >> 10} KiB"
    return {
        "version": f"Plait {versions.plait}, Python {versions.python}, torch {versions.torch}",
        "model": f"{facts.model.path}: {len(facts.model.files)} files, {facts.model.num_bytes / 1e9:.2f} GB",
        "gpus": ", ".join(f"{gpu.name} ({gpu.free_bytes / 1e9:.0f} GB free)" for gpu in machine.gpus)
        or "none: ranks compute on CPUs",
        "peers": "none to ask" if len(machine.gpus) < 2 else "no pair of GPUs lacks access",
        "memory": f"{machine.free_bytes / 1e9:.1f} GB free",
        "shm": f"/dev/shm has {machine.shm_bytes / 1e9:.1f} GB",
        "memlock": f"{memlock} may be locked",
        "files": f"{machine.open_files} open files at most",
        "ports": f"free on {facts.address}",
    }
