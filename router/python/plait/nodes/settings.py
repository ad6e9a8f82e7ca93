"""Settings of `plait launch`: where this node is, and what the launcher does. The rest are those of `plait serve`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from plait.admin_settings import AdminSettings
from plait.deadline_settings import DeadlineSettings
from plait.generation_settings import GenerationSettings
from plait.hub_settings import HubSettings
from plait.kv_events_settings import KvEventsSettings
from plait.log_settings import LogSettings
from plait.metrics_settings import MetricsSettings
from plait.nodes.signals import SILENCE_SECONDS
from plait.proxy_settings import ProxySettings
from plait.setting import Setting
from plait.settings import (
    AttentionSettings,
    DeviceSettings,
    HttpSettings,
    KvCacheSettings,
    ModelSettings,
    PageSettings,
    PoolingSettings,
    ProcessSettings,
    QueueSeconds,
    SchedulerSettings,
    TemplateSettings,
)
from plait.tls_settings import TlsSettings
from plait.trace_settings import TraceSettings

NodeCount = Annotated[int, Meta(ge=1, le=64)]
NodeNumber = Annotated[int, Meta(ge=0, le=63)]
RestartCount = Annotated[int, Meta(ge=1, le=1000)]
GpuCount = Annotated[int, Meta(ge=0, le=64)]
Launcher = Literal["auto", "none", "slurm", "openmpi", "torchrun", "lws"]


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes."""

    nnodes: Annotated[NodeCount | None, Setting("nodes of the server", unset="as the job's launcher says, else 1")] = (
        None
    )
    node_rank: Annotated[
        NodeNumber | None,
        Setting("this node's number from 0; node 0 is the head", unset="as the job's launcher says, else 0"),
    ] = None
    head: Annotated[
        str | None,
        Setting(
            "HOST or HOST:PORT of node 0 ([ADDRESS]:PORT for IPv6); the launchers meet there, the engines at the port "
            "after it",
            unset="as the job's launcher says; port 7450, or one that follows from Slurm's job id",
        ),
    ] = None
    launcher: Annotated[
        Launcher, Setting("whose environment variables say which node this is; none reads the flags alone")
    ] = "auto"
    node_address: Annotated[
        str | None,
        Setting("address of this node for the others", unset="this machine's address on the way to the head"),
    ] = None
    gpus_per_node: Annotated[
        GpuCount | None, Setting("GPUs that the ranks of a node may take; 0: ranks compute on CPUs", unset="as found")
    ] = None
    keys: Annotated[
        str | None,
        Setting("folder with this node's files of `plait keys new`", unset="none; several nodes need one"),
    ] = None
    meet_timeout_seconds: Annotated[
        QueueSeconds, Setting("longest time in s until all nodes have met; then the last line names the missing ones")
    ] = 120.0
    preflight_timeout_seconds: Annotated[
        QueueSeconds, Setting("longest time in s of the preflight, after the nodes have met")
    ] = 60.0
    restart: Annotated[
        Literal["never", "group", "backoff"],
        Setting(
            "what follows when a rank or node is lost: all end; group: all nodes meet again at once; backoff: after "
            "5 s, and twice as long each time, up to 5 minutes"
        ),
    ] = "never"
    restart_budget: Annotated[RestartCount, Setting("restarts within an hour, after which all end")] = 5
    restart_file: Annotated[
        str | None,
        Setting("file of the head that keeps the times of restarts, so that a new launcher counts on", unset="none"),
    ] = None
    combined_log: Annotated[
        str | None, Setting("file to which the head appends the lines of all nodes", unset="standard error alone")
    ] = None
    stop_with_stdin: Annotated[
        bool,
        Setting(
            "drain at a line on standard input, stop at once at its end, or where dots came, each a sign of life, and "
            f"stay away for {SILENCE_SECONDS:g} s: for a launcher behind ssh"
        ),
    ] = False
    dry_run: Annotated[bool, Setting("print the layout and start nothing")] = False


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):  # budget: one field a group of flags
    """Settings of `plait launch`: the nodes', and all of `plait serve` but those that the launcher sets itself."""

    nodes: NodeSettings = NodeSettings()
    http: HttpSettings = HttpSettings()
    tls: TlsSettings = TlsSettings()
    admin: AdminSettings = AdminSettings()
    proxy: ProxySettings = ProxySettings()
    model: ModelSettings = ModelSettings()
    hub: HubSettings = HubSettings()
    pooling: PoolingSettings = PoolingSettings()
    template: TemplateSettings = TemplateSettings()
    generation: GenerationSettings = GenerationSettings()
    deadlines: DeadlineSettings = DeadlineSettings()
    device: DeviceSettings = DeviceSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    pages: PageSettings = PageSettings()
    attention: AttentionSettings = AttentionSettings()
    kv_cache: KvCacheSettings = KvCacheSettings()
    kv_events: KvEventsSettings = KvEventsSettings()
    process: ProcessSettings = ProcessSettings()
    logs: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TraceSettings = TraceSettings()
