"""What the launchers of jobs say in environment variables: how many nodes, which one this is, where the head is.

Each of them starts one `plait launch` a node. A reader says how to change the job's command if it starts more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from plait.errors import SettingsError
from plait.nodes.node_list import expand_node_list

HEAD_PORT = 7450
# Jobs that share a node need ports of their own. All stay below 32768, where ports of outgoing connections begin.
_FIRST_JOB_PORT, _PORTS_A_JOB, _NUM_JOBS = 20_000, 16, 600

Environment = Mapping[str, str]


class JobPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A node's place as its job's launcher gives it."""

    launcher: str
    """As --launcher names it."""
    num_nodes: int
    node: int
    head: str | None
    """Host name or address of node 0; None: the launcher does not say."""
    head_port: int = HEAD_PORT
    said_by: str
    """The variables that were read, for messages."""
    is_name_late: bool = False
    """Whether the head's name may not be known to DNS yet."""


def _read_slurm(environment: Environment) -> JobPlace | None:
    if "SLURM_JOB_ID" not in environment:
        return None
    is_step = "SLURM_STEP_NUM_NODES" in environment
    num_nodes = _number(environment, "SLURM_STEP_NUM_NODES" if is_step else "SLURM_JOB_NUM_NODES", 1)
    if not is_step and num_nodes > 1:
        raise SettingsError(
            f"this is Slurm's batch script, which runs on the first of {num_nodes} nodes alone; start all with "
            "`srun --ntasks-per-node=1 plait launch ...`"
        )
    if (num_tasks := _number(environment, "SLURM_STEP_NUM_TASKS", num_nodes)) != num_nodes and is_step:
        raise SettingsError(
            f"Slurm starts {num_tasks} tasks on {num_nodes} nodes (SLURM_STEP_NUM_TASKS); plait launch is one command "
            "a node: add --ntasks-per-node=1 to srun"
        )
    hosts = expand_node_list(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", ""))
    job = _number(environment, "SLURM_JOB_ID", 0)
    return JobPlace(
        launcher="slurm",
        num_nodes=num_nodes,
        node=_number(environment, "SLURM_NODEID", 0) if is_step else 0,
        head=hosts[0],
        head_port=_FIRST_JOB_PORT + _PORTS_A_JOB * (job % _NUM_JOBS),
        said_by="SLURM_NODEID and SLURM_STEP_NODELIST" if is_step else "SLURM_JOB_NODELIST",
    )


def _read_open_mpi(environment: Environment) -> JobPlace | None:
    if "OMPI_COMM_WORLD_SIZE" not in environment:
        return None
    if (num_local := _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)) != 1:
        raise SettingsError(
            f"Open MPI starts {num_local} processes on this node (OMPI_COMM_WORLD_LOCAL_SIZE); plait launch is one "
            "command a node: add --map-by ppr:1:node to mpirun"
        )
    return JobPlace(
        launcher="openmpi",
        num_nodes=_number(environment, "OMPI_COMM_WORLD_SIZE"),
        node=_number(environment, "OMPI_COMM_WORLD_RANK"),
        head=None,
        said_by="OMPI_COMM_WORLD_RANK",
    )


def _read_torchrun(environment: Environment) -> JobPlace | None:
    """torchrun's, and those of jobs that set MASTER_ADDR, WORLD_SIZE and RANK for it."""
    if not {"MASTER_ADDR", "WORLD_SIZE", "RANK"} <= environment.keys():
        return None
    if (num_local := _number(environment, "LOCAL_WORLD_SIZE", 1)) != 1:
        raise SettingsError(
            f"torchrun starts {num_local} processes on this node (LOCAL_WORLD_SIZE); plait launch is one command a "
            "node: give torchrun --nproc-per-node 1"
        )
    return JobPlace(
        launcher="torchrun",
        num_nodes=_number(environment, "WORLD_SIZE"),
        node=_number(environment, "RANK"),
        head=environment["MASTER_ADDR"],  # MASTER_PORT is torchrun's own
        said_by="RANK, WORLD_SIZE and MASTER_ADDR",
    )


def _read_leader_worker_set(environment: Environment) -> JobPlace | None:
    if "LWS_LEADER_ADDRESS" not in environment:
        return None
    return JobPlace(
        launcher="lws",
        num_nodes=_number(environment, "LWS_GROUP_SIZE"),
        node=_number(environment, "LWS_WORKER_INDEX"),
        head=environment["LWS_LEADER_ADDRESS"],
        said_by="LWS_WORKER_INDEX and LWS_LEADER_ADDRESS",
        is_name_late=True,
    )


_READERS: dict[str, Callable[[Environment], JobPlace | None]] = {
    "slurm": _read_slurm,
    "openmpi": _read_open_mpi,
    "torchrun": _read_torchrun,
    "lws": _read_leader_worker_set,
}


def read_job(environment: Environment, launcher: str = "auto") -> JobPlace | None:
    """The place that the variables of `launcher` give; of whichever is there for `auto`.

    Raises `SettingsError` for variables of two launchers at once, missing ones and ones that contradict each other.
    """
    if launcher == "none":
        return None
    if launcher != "auto":
        place = _READERS[launcher](environment)
        if place is None:
            raise SettingsError(f"--launcher is {launcher}, but its environment variables are not set here")
        return _checked(place)
    there = [name for name in _READERS if _is_there(name, environment)]
    if len(there) > 1:
        raise SettingsError(
            f"the environment has the variables of {' and '.join(there)}; say whose count with --launcher "
            f"({', '.join(there)}, or none to read the flags alone)"
        )
    place = _READERS[there[0]](environment) if there else None
    return _checked(place) if place is not None else None


def _is_there(launcher: str, environment: Environment) -> bool:
    try:
        return _READERS[launcher](environment) is not None
    except SettingsError:
        return True


def _checked(place: JobPlace) -> JobPlace:
    if not 0 <= place.node < place.num_nodes:
        raise SettingsError(
            f"{place.launcher} says that this is node {place.node} of {place.num_nodes} ({place.said_by}); nodes count "
            "from 0"
        )
    if place.head == "":
        raise SettingsError(
            f"{place.launcher} gives an empty name of the head ({place.said_by}); give --head HOST:PORT"
        )
    return place


def _number(environment: Environment, name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        what = "is not set" if text is None else f"is {text!r}"
        raise SettingsError(f"the variable {name} {what}; a whole number is needed, or --launcher none and the flags")
    return int(text)
