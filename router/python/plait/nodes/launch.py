"""`plait launch`: this node's part of a server over several nodes, from the command line to the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import time
from pathlib import Path

import msgspec
from plait_proto import ExitCode

from plait.check_settings import check_settings
from plait.errors import DONE, SettingsError, StartError
from plait.launch.group_checks import check_group_settings
from plait.launch.group_place import is_in_group
from plait.launch.listen import is_handed_over
from plait.launch.model_layout import check_model_layout
from plait.log import add_to_json_lines
from plait.nodes.channel import Listener
from plait.nodes.engine_words import engine_settings_of, engine_words
from plait.nodes.environment import Environment
from plait.nodes.facts import describe_link, find_gpus
from plait.nodes.head import Head
from plait.nodes.key_files import NodeKeys, read_keys
from plait.nodes.layout import Layout, PortUse, layout_lines, link_warning, listeners, plan_layout
from plait.nodes.log_lines import LogWriter
from plait.nodes.member import Member
from plait.nodes.messages import Gpu, Stop
from plait.nodes.place import Place, check_head_address, find_place, own_address, resolve_head, with_port
from plait.nodes.plan import LaunchPlan
from plait.nodes.settings import LaunchSettings
from plait.nodes.signals import StopRequests
from plait.output import say
from plait.restarts import RestartBudget, restart_file_held


def launch(model: str | None, settings: LaunchSettings, environment: Environment) -> int:
    """Serve `model` with the other nodes until all end; the exit code. Raises `StartError`."""
    if is_handed_over(environment):
        raise SettingsError(
            "systemd hands over a socket, and plait launch opens its ports itself; run `systemctl disable --now` for "
            "the .socket unit, or serve one node with plait serve"
        )
    settings = _without_gpus(settings) if settings.nodes.gpus_per_node == 0 else settings
    place = find_place(settings.nodes, environment)
    add_to_json_lines(node=place.node)
    gpus = find_gpus(environment.get("CUDA_VISIBLE_DEVICES"))
    layout = _layout(settings, place, gpus)
    keys = None if settings.nodes.dry_run else _keys(settings, place)
    plan = _plan(model, settings, place, layout, keys, gpus, environment)
    if settings.nodes.dry_run:
        check_model_layout(model, settings.process)
        _print_layout(plan)
        return DONE
    return asyncio.run(_run(plan))


def _without_gpus(settings: LaunchSettings) -> LaunchSettings:
    """Ranks that may take no GPU compute on the CPU, also where there are GPUs."""
    if settings.device.device == "cuda":
        raise SettingsError("--gpus-per-node is 0, but --device is cuda; leave one of them out")
    return msgspec.structs.replace(settings, device=msgspec.structs.replace(settings.device, device="cpu"))


def _layout(settings: LaunchSettings, place: Place, gpus: tuple[Gpu, ...]) -> Layout:
    given = settings.nodes.gpus_per_node
    num_gpus = 0 if settings.device.device == "cpu" else len(gpus) if given is None else given
    process = settings.process
    return plan_layout(
        num_nodes=place.num_nodes,
        tp=process.tp,
        dp=process.dp,
        dp_attention=process.dp_attention,
        gpus_per_node=num_gpus,
    )


def _keys(settings: LaunchSettings, place: Place) -> NodeKeys | None:
    if place.num_nodes == 1:
        return None
    if settings.nodes.keys is None:
        raise SettingsError(
            f"{place.num_nodes} nodes need --keys: `plait keys new DIR --nodes {place.num_nodes}` makes them, and each "
            "node needs public.keys and its own"
        )
    return read_keys(Path(settings.nodes.keys), place.node, place.num_nodes)


def with_keys_of_now(plan: LaunchPlan) -> LaunchPlan:
    """For the next meeting, as engines read the files at each start. Raises `SettingsError`."""
    keys = _keys(plan.settings, plan.place)
    if keys != plan.keys:
        say("The key files have changed: the nodes meet with the new keys")
    return msgspec.structs.replace(plan, keys=keys)


def _plan(
    model: str | None,
    settings: LaunchSettings,
    place: Place,
    layout: Layout,
    keys: NodeKeys | None,
    gpus: tuple[Gpu, ...],
    environment: Environment,
) -> LaunchPlan:
    head = resolve_head(place, settings.nodes.meet_timeout_seconds)
    check_head_address(place, head)
    address, reason = own_address(settings.nodes, head)
    if place.node == 0 and place.num_nodes > 1:
        if settings.nodes.node_address not in (None, head):
            raise SettingsError(f"--node-address is {address}, but node 0 is at {head} (--head); leave it out here")
        address, reason = head, f"the head's, by {place.said_by}"
    has_engine = layout.has_engine(place.node)
    engine = engine_settings_of(settings, layout, place.node if has_engine else 0, head, place.head_port)
    check_settings(engine)
    if is_in_group(engine):
        check_group_settings(engine)
    opened = _listeners(settings, layout, head, place.head_port)[1 if place.num_nodes > 1 else 0 :]
    return LaunchPlan(
        model=model,
        settings=settings,
        place=place,
        layout=layout,
        head_address=head,
        address=address,
        address_reason=reason,
        gpus=gpus if layout.has_gpus else (),
        environment=environment,
        keys=keys,
        words=engine_words(model, engine) if has_engine else [],
        ports=[(one.host, one.port) for one in opened if one.node in (None, place.node)],
    )


def _listeners(settings: LaunchSettings, layout: Layout, head: str, port: int) -> list[PortUse]:
    doors = {} if settings.proxy.uds else {"HTTP": (settings.http.host, settings.http.port)}
    if settings.admin.admin_port is not None:
        doors["admin listener"] = (settings.admin.admin_host, settings.admin.admin_port)
    return list(listeners(layout, head, port, doors))


def _print_layout(plan: LaunchPlan) -> None:
    for line in layout_lines(
        plan.layout, _listeners(plan.settings, plan.layout, plan.head_address, plan.place.head_port)
    ):
        say(line)
    _warn_of_link(plan)
    say(f"This is node {plan.node} ({plan.place.said_by})")
    say(f"  address  {plan.address}: {plan.address_reason}")
    words = shlex.join(["plait", *plan.words]) if plan.words else "on node 0; this node starts ranks alone"
    say(f"  engine   {words}")


def _warn_of_link(plan: LaunchPlan) -> None:
    if warning := link_warning(plan.layout, describe_link(plan.address)):
        say(warning)


async def _run(plan: LaunchPlan) -> int:
    requests = StopRequests()
    requests.attach(asyncio.get_running_loop())
    nodes = plan.settings.nodes
    if nodes.stop_with_stdin:
        requests.attach_stdin(asyncio.get_running_loop(), sys.stdin.fileno())
    _warn_of_link(plan)
    file = nodes.restart_file if plan.node == 0 else None
    with restart_file_held(file):
        return await _run_again(plan, RestartBudget(nodes.restart, nodes.restart_budget, file), requests)


async def _run_again(plan: LaunchPlan, budget: RestartBudget, requests: StopRequests) -> int:
    """As often as the budget allows."""
    log = _open_log(plan)
    if plan.node == 0 and (delay := budget.delay_at_start(time.time())):
        await _wait(delay, requests)
    while requests.num_signals == 0:
        stop = await _run_once(plan, budget, log, requests)
        if stop.restart_after is None:
            return _exit_code(stop)
        say(f"Restart in {stop.restart_after:g} s: {stop.cause.reason}")
        await _wait(stop.restart_after, requests)
        plan = with_keys_of_now(plan)
    say("Stopped")
    return DONE


async def _run_once(plan: LaunchPlan, budget: RestartBudget, log: LogWriter, requests: StopRequests) -> Stop:
    if plan.node != 0:
        assert plan.keys is not None, "several nodes have keys"
        return await Member(plan, plan.keys, log, requests).run()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(plan, plan.keys)) if plan.keys is not None else None
        return await Head(plan, listener, log, requests).run(budget)


def _listen(plan: LaunchPlan, keys: NodeKeys) -> Listener:
    port = plan.place.head_port
    try:
        return Listener(keys, plan.node, plan.head_address, port)
    except OSError as error:
        raise SettingsError(
            f"node 0 cannot listen at {with_port(plan.head_address, port)}: {error.strerror}; --head must be an "
            "address of this machine with a free port, and only one node has the rank 0"
        ) from error


def _open_log(plan: LaunchPlan) -> LogWriter:
    file = plan.settings.nodes.combined_log if plan.node == 0 else None
    try:
        return LogWriter(file)
    except OSError as error:
        raise SettingsError(f"--combined-log {file} cannot be opened: {error.strerror}; give another file") from error


async def _wait(seconds: float, requests: StopRequests) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and requests.num_signals == 0:
        await asyncio.sleep(0.1)


def _exit_code(stop: Stop) -> int:
    """The exit code; raises `StartError` with the root cause for a failure."""
    if stop.cause.code == DONE:
        say(f"Stopped: {stop.cause.reason}")
        return DONE
    raise StartError(stop.cause.reason, ExitCode(stop.cause.code))
