"""Settings of `plait serve`: one struct for each component, each default beside its meaning.

The command line (`plait.flags`) and docs/settings.md are generated from these structs. Nothing repeats a default.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from plait_proto import FAMILIES, MAX_PAGE_SIZE

from plait.admin_settings import AdminSettings
from plait.deadline_settings import DeadlineSettings
from plait.generation_settings import GenerationSettings
from plait.hub_settings import HubSettings
from plait.kv_events_settings import KvEventsSettings
from plait.log_settings import LogSettings
from plait.metrics_settings import MetricsSettings
from plait.proxy_settings import ProxySettings
from plait.setting import Setting
from plait.tls_settings import TlsSettings
from plait.trace_settings import TraceSettings

DRAFT_TOKENS = 0
"""Speculative tokens of a decode row: no attention backend verifies any yet."""
PAGE_SIZE = 64
"""Tokens of a page, where the model's family does not say otherwise."""
_OTHER_PAGE_SIZES = ", ".join(f"{family.page_size} for {family.name}" for family in FAMILIES if family.page_size)
LogLevel = Literal["debug", "info", "warning", "error"]

Port = Annotated[int, Meta(ge=0, le=65_535)]
# Below 1e-6 nothing but zeros fits FP8.
KvScale = Annotated[float, Meta(ge=1e-6, le=1e6)]
ModelName = Annotated[str, Meta(min_length=1, max_length=256)]
# The log-probabilities of a step's prompt tokens, up to 168 bytes each, must fit a frame of 16 MiB.
TokenLimit = Annotated[int, Meta(ge=1, le=65_536)]
ContextLength = Annotated[int, Meta(ge=1, le=16_777_216)]
SlotCount = Annotated[int, Meta(ge=1, le=4096)]
QueueLength = Annotated[int, Meta(ge=1, le=1_048_576)]
QueueTokens = Annotated[int, Meta(ge=1, le=1 << 40)]
StepCount = Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
SkipCount = Annotated[int, Meta(ge=0, le=1_048_576)]
DelaySeconds = Annotated[float, Meta(ge=0, le=3600)]
QueueSeconds = Annotated[float, Meta(gt=0, le=1e9)]
AgingSeconds = Annotated[float, Meta(gt=0, le=4000)]
"""Times the largest `priority` it is a time on the scheduler's clock."""
PriorityDifference = Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]
Policy = Literal["fcfs", "priority", "fair", "cache-aware"]
PageSize = Annotated[int, Meta(ge=1, le=MAX_PAGE_SIZE)]
PageCount = Annotated[int, Meta(ge=1, le=1 << 30)]
SnapshotCount = Annotated[int, Meta(ge=0, le=1 << 24)]
SnapshotInterval = Annotated[int, Meta(ge=1, le=1 << 30)]
Watermark = Annotated[int, Meta(ge=0, le=1 << 30)]
Fraction = Annotated[float, Meta(gt=0, le=1)]
RankCount = Annotated[int, Meta(ge=1, le=64)]
ReplicaCount = Annotated[int, Meta(ge=1, le=64)]
EngineCount = Annotated[int, Meta(ge=1, le=1024)]
EngineNumber = Annotated[int, Meta(ge=0, le=1023)]
HostCount = Annotated[int, Meta(ge=1, le=64)]
RestartCount = Annotated[int, Meta(ge=0, le=1000)]
ThreadCount = Annotated[int, Meta(ge=1, le=4096)]
# A target over a minute has no effect.
ItlTarget = Annotated[float, Meta(gt=0, le=60_000)]
# The server's limit.
Temperature = Annotated[float, Meta(ge=0, le=100)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


Pooling = Literal["last", "mean"]


class HttpSettings(msgspec.Struct, frozen=True, kw_only=True):
    """HTTP server."""

    host: Annotated[str, Setting("address to listen on; any but loopback needs --api-key-file")] = "127.0.0.1"
    port: Annotated[Port, Setting("TCP port; 0 takes a free one, which the ready line prints")] = 8000
    api_key_file: Annotated[
        str | None,
        Setting(
            "file with one API key a line, readable by its owner only, read again when it changes; after a key may "
            "stand name=, weight=, priority=, max_running=, requests_per_minute= and tokens_per_minute=",
            unset="no key is needed",
        ),
    ] = None
    metrics_without_key: Annotated[
        bool,
        Setting("answer /metrics without a key too: for readers that send none, such as a gateway's endpoint picker"),
    ] = False
    ui: Annotated[bool, Setting("a small chat page at /; it needs no key, what it asks the server does")] = True
    served_model_name: Annotated[
        tuple[ModelName, ...] | None,
        Setting(
            "model ids in the API, all of the same model: a request may have any of them, and its answer repeats it. "
            "MODEL comes before them",
            unset="the folder's or file's name",
        ),
    ] = None
    enable_prompt_tokens_details: Annotated[
        bool,
        Setting(
            "say in each usage how many prompt tokens were cached. Who shares a key can then tell what others have "
            "asked; a request with a `cache_salt` is always told"
        ),
    ] = False
    trust_user_field: Annotated[
        bool,
        Setting(
            "take a request's `user` as its tenant: only for a gateway that sets it, since clients could choose a new "
            "one for each request"
        ),
    ] = False
    shutdown_delay_seconds: Annotated[
        DelaySeconds,
        Setting(
            "time in s from the signal to the drain; /ready answers 503 and requests are still taken, until balancers "
            "have forgotten the server"
        ),
    ] = 0.0


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Model."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Setting(
            "number format of weights and KV; auto takes bfloat16 if the processor has it, else float32. Only auto "
            "keeps weights quantised as the files have them (a CPU: if that is bfloat16); any other type widens them"
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "fp8"],
        Setting(
            "auto takes the weights as the files have them; fp8 makes 16-bit weights FP8 (e4m3, one scale an output) "
            "while it reads them, on a Hopper GPU"
        ),
    ] = "auto"
    load_format: Annotated[
        Literal["auto", "dummy"],
        Setting("auto reads the model's weights; dummy makes random ones from the configuration alone"),
    ] = "auto"
    max_model_len: Annotated[
        ContextLength | None,
        Setting("longest prompt plus output, in tokens", ("--context-length",), unset="the model's context"),
    ] = None


class PoolingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings."""

    pooling: Annotated[
        Pooling, Setting("what a prompt's vector is: the last token's hidden state, or the mean of all tokens'")
    ] = "last"


class TemplateSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Chat template."""

    chat_template: Annotated[
        str | None, Setting("file with the Jinja template of chats, in place of the model's own", unset="the model's")
    ] = None
    chat_template_kwargs: Annotated[
        str | None,
        Setting(
            'JSON object of variables for the chat template, such as {"enable_thinking": false}; a request\'s '
            "`chat_template_kwargs` and `reasoning_effort` go first",
            ("--default-chat-template-kwargs",),
            unset="none",
        ),
    ] = None
    tool_parser: Annotated[
        str | None,
        Setting(
            "how the model writes tool calls: hermes, qwen3_coder, llama3_json, pythonic, deepseek_v3, deepseek_v31, "
            "minimax_m2, mistral, glm45, kimi_k2, or none",
            ("--tool-call-parser",),
            unset="as the chat template shows",
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        Setting(
            "how the model writes its thoughts: qwen3 (<think>; deepseek_r1 and others are names for the same), "
            "mistral ([THINK]), or none",
            unset="as the chat template shows",
        ),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool, Setting("take `tools` in chats and find calls in the answers; off: `tools` are refused")
    ] = True


class DeviceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Device."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], Setting("device that computes; auto takes a GPU if there is one")
    ] = "auto"
    cuda_graphs: Annotated[
        bool,
        Setting(
            "capture decode steps as CUDA graphs, if the attention backend allows it",
            off=("--enforce-eager", "--disable-cuda-graph"),
        ),
    ] = True
    cuda_graph_max_bs: Annotated[
        SlotCount | None,
        Setting(
            "rows of the largest captured decode step",
            ("--max-graph-batch", "--max-cudagraph-capture-size"),
            unset="--max-seqs, up to 1024",
        ),
    ] = None
    custom_all_reduce: Annotated[
        bool,
        Setting(
            "let the GPUs of a replica write into each other's memory for all-reduces; off leaves these to NCCL",
            off=("--disable-custom-all-reduce",),
        ),
    ] = True


class SchedulerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduler."""

    max_batch_tokens: Annotated[
        TokenLimit | None,
        Setting(
            "most tokens of one step",
            ("--max-num-batched-tokens", "--chunked-prefill-size"),
            unset="160 on a CPU; on a GPU 2048 to 8192, by the work that a token takes",
        ),
    ] = None
    max_seqs: Annotated[
        SlotCount | None,
        Setting(
            "most requests that run at a time; others wait",
            ("--max-num-seqs", "--max-running-requests"),
            unset="64 on a CPU; on a GPU 64 to 1024, by the tokens that its memory holds",
        ),
    ] = None
    long_prefill_token_threshold: Annotated[
        TokenLimit | None,
        Setting("most tokens of one prompt in one step", ("--long-prefill",), unset="--max-batch-tokens"),
    ] = None
    mixed: Annotated[
        bool,
        Setting("prefill and decode rows in one batch (chunked prefill, mixed batching)", ("--enable-mixed-chunk",)),
    ] = True
    itl_target_ms: Annotated[
        ItlTarget | None,
        Setting(
            "target time in ms of a step that decodes; prefill joins as far as it fits, requests are admitted while it "
            "leaves time",
            unset="no target",
        ),
    ] = None
    overlap: Annotated[
        bool,
        Setting("plan the next step while one runs", ("--async-scheduling",), off=("--disable-overlap-schedule",)),
    ] = True
    policy: Annotated[
        Policy,
        Setting(
            "order of requests: fcfs by arrival, priority by their `priority` (smaller first), fair by the step time "
            "that each tenant (API key, or see --trust-user-field) has taken, "
            "cache-aware by the longest cached prefix (SGLang's lpm)",
            ("--scheduling-policy", "--schedule-policy"),
        ),
    ] = "fcfs"
    prefill_starvation_steps: Annotated[
        StepCount,
        Setting("steps without progress after which the oldest prefill goes first", ("--starvation-steps",)),
    ] = 8
    max_queue: Annotated[
        QueueLength,
        Setting(
            "most requests that wait; others get 429, but an empty queue takes any one call", ("--max-queued-requests",)
        ),
    ] = 1024
    max_queue_tokens: Annotated[QueueTokens, Setting("most prompt tokens that wait; others get 429")] = 1 << 22
    max_queue_seconds: Annotated[
        QueueSeconds | None,
        Setting("longest wait of a request that has not run yet; then it gets 504", unset="no limit"),
    ] = None
    max_skip_ahead: Annotated[
        SkipCount,
        Setting("requests that may be admitted before one whose KV pages are not free; 0 keeps the order strictly"),
    ] = 8
    priority_preemption_threshold: Annotated[
        PriorityDifference | None,
        Setting(
            "a waiting request preempts running ones whose `priority` is larger by this much; needs --policy priority",
            ("--priority-scheduling-preemption-threshold",),
            unset="waiting requests preempt none",
        ),
    ] = None
    priority_aging_seconds: Annotated[
        AgingSeconds,
        Setting("waiting time in s that counts as much as a `priority` smaller by 1; it bounds every wait"),
    ] = 60.0


class PageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """KV pages."""

    page_size: Annotated[
        PageSize | None,
        Setting("tokens in a page, a power of two", ("--block-size",), unset=f"{PAGE_SIZE}, {_OTHER_PAGE_SIZES}"),
    ] = None
    num_pages: Annotated[
        PageCount | None,
        Setting("KV pages in the pool", ("--num-gpu-blocks-override",), unset="as many as fit the memory"),
    ] = None
    prefix_cache: Annotated[
        bool,
        Setting(
            "keep computed pages, so that prompts reuse the prefix they share with earlier ones",
            ("--enable-prefix-caching",),
            off=("--disable-radix-cache",),
        ),
    ] = True
    watermark: Annotated[
        Watermark | None,
        Setting(
            "pages kept free at admission, for the next tokens of running requests",
            unset="1% of the pool, and what running requests are expected to need by what was seen",
        ),
    ] = None
    num_snapshots: Annotated[
        SnapshotCount | None,
        Setting(
            "snapshots of slot state, from which prompts with a cached prefix go on (DeepSeek-V4)",
            unset="as many as take an eighth of what the pages take",
        ),
    ] = None
    snapshot_interval: Annotated[
        SnapshotInterval,
        Setting("tokens of a sequence in which one snapshot is kept, beside those where prompts end and part"),
    ] = 4096
    memory_fraction: Annotated[
        Fraction | None,
        Setting(
            "share of the free memory for weights and KV pages",
            ("--gpu-memory-utilization", "--mem-fraction-static"),
            unset="0.9 on a GPU; on a CPU min(4 GiB, a quarter of free memory) for pages",
        ),
    ] = None


class AttentionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Attention."""

    attention_backend: Annotated[
        Literal[
            "auto",
            "torch",
            "triton",
            "flashinfer",
            "trtllm_mha",
            "trtllm_mla",
            "cutlass_mla",
            "trtllm_sparse_mla",
            "flashmla",
            "flashinfer_mla",
            "triton_mla",
        ],
        Setting("attention backend; auto takes one of the fastest that pass their self-check on this device"),
    ] = "auto"
    mla_context_chunk_size: Annotated[
        TokenLimit,
        Setting("cached tokens that an MLA prefill (DeepSeek) attends to at a time", ("--context-chunk",)),
    ] = 4096
    """Keys and values of 4,096 tokens take 0.4 GB in bfloat16 with DeepSeek-V3's 128 heads."""


class KvCacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """KV cache."""

    kv_cache_dtype: Annotated[
        Literal["auto", "fp8"],
        Setting(
            "type of the KV cache: auto is the model's own; fp8 (e4m3) holds twice as many tokens", ("--kv-dtype",)
        ),
    ] = "auto"
    k_scale: Annotated[
        KvScale | None,
        Setting("FP8 KV-cache scale for keys (value = stored * scale)", unset="that of the files for each layer, or 1"),
    ] = None
    v_scale: Annotated[
        KvScale | None,
        Setting("FP8 KV-cache scale for values", unset="that of the files for each layer, or 1"),
    ] = None


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Processes."""

    tp: Annotated[
        RankCount,
        Setting("tensor parallelism: ranks that share the model", ("--tensor-parallel-size", "--tp-size")),
    ] = 1
    dp: Annotated[
        ReplicaCount,
        Setting(
            "data parallelism: replicas of the model behind one address, each with --tp ranks",
            ("--data-parallel-size", "--dp-size"),
        ),
    ] = 1
    dp_attention: Annotated[
        bool,
        Setting(
            "attention in each of the --dp replicas, each expert on one rank of all (MLA models with experts)",
            ("--enable-dp-attention",),
        ),
    ] = False
    threads: Annotated[
        ThreadCount | None,
        Setting("threads of a CPU rank", unset="the cores of this process, divided among the ranks"),
    ] = None
    text_threads: Annotated[
        ThreadCount | None,
        Setting(
            "threads that tokenise prompts and render chat templates",
            ("--tokenizer-worker-num",),
            unset="a quarter of the cores of this process, 2 to 8",
        ),
    ] = None
    seed: Annotated[
        Seed | None,
        Setting("sampling seed for requests that send none", ("--random-seed",), unset="random at each start"),
    ] = None
    kv_hash_key_file: Annotated[
        str | None,
        Setting(
            "file with a secret of 32 characters or more; replicas with the same one hash equal prompts alike",
            unset="random at each start",
        ),
    ] = None
    step_trace: Annotated[
        str | None,
        Setting(
            "new .jsonl file that records the work and time of each step, a million at most, for `plait simulate "
            "--hardware`",
            ("--step-records",),
            unset="none",
        ),
    ] = None
    load_timeout_seconds: Annotated[
        QueueSeconds,
        Setting(
            "longest time in s from the start until all ranks have loaded the model and run a first step; then the "
            "server exits with code 5",
        ),
    ] = 1800.0
    """A terabyte at 600 MB/s."""
    capture_timeout_seconds: Annotated[
        QueueSeconds,
        Setting(
            "of that, the longest time in s from the last rank's weights to its first step: kernels are compiled and "
            "CUDA graphs captured; then the server exits with code 5"
        ),
    ] = 1800.0
    log_level: Annotated[LogLevel, Setting("lowest level of log lines on standard error")] = "info"


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Group of engines."""

    group_engines: Annotated[
        EngineCount, Setting("engines whose replicas step together; each has --dp of them, and an address of its own")
    ] = 1
    group_engine: Annotated[
        EngineNumber, Setting("this engine's number in its group: engine 0 listens, the others connect")
    ] = 0
    group_endpoint: Annotated[
        str | None,
        Setting(
            "where engine 0 listens: tcp://HOST:PORT with keys, or ipc://PATH in a directory of mode 0700", unset="none"
        ),
    ] = None
    group_secret_key_file: Annotated[
        str | None,
        Setting("file with this engine's CURVE secret key, readable by its owner only", unset="no keys are used"),
    ] = None
    group_public_keys_file: Annotated[
        str | None,
        Setting("file with the CURVE public keys of all engines, one a line, engine 0 first", unset="no keys are used"),
    ] = None


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks on other hosts."""

    rank_hosts: Annotated[
        HostCount,
        Setting(
            "hosts that have equally many of the ranks; this is the first. `plait launch` starts the ranks of others"
        ),
    ] = 1
    rank_endpoint: Annotated[
        str | None,
        Setting(
            "where ranks of other hosts connect: tcp://HOST:PORT, replica N at PORT + N; it takes keys", unset="none"
        ),
    ] = None
    rank_secret_key_file: Annotated[
        str | None, Setting("file with this host's CURVE secret key, readable by its owner only", unset="none")
    ] = None
    rank_public_keys_file: Annotated[
        str | None,
        Setting("file with the CURVE public keys of all hosts, one a line, this host first", unset="none"),
    ] = None


class RestartSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Lost ranks."""

    restart: Annotated[
        Literal["never", "group", "backoff"],
        Setting(
            "what follows when a rank is lost: its replica fails; group: the replica's ranks start again at once, and "
            "its requests go on; backoff: the same, after 5 s from the second loss within an hour on, and twice as "
            "long each time, up to 5 minutes"
        ),
    ] = "never"
    restart_budget: Annotated[RestartCount, Setting("restarts within an hour, after which a loss ends the replica")] = 5
    restart_file: Annotated[
        str | None, Setting("file that keeps the times of losses, so that a new server counts on", unset="none")
    ] = None


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):  # budget: one field a group of flags
    """Settings of `plait serve`."""

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
    group: GroupSettings = GroupSettings()
    hosts: HostSettings = HostSettings()
    restarts: RestartSettings = RestartSettings()
    logs: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    traces: TraceSettings = TraceSettings()


class TalkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Conversation."""

    url: Annotated[str, Setting("address of the server")] = "http://127.0.0.1:8000"
    api_key_file: Annotated[str | None, Setting("file whose first line is a key", unset="no key is sent")] = None
    temperature: Annotated[
        Temperature | None, Setting("sampling temperature; 0 always takes the likeliest token", unset="the model's")
    ] = None


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `plait chat`."""

    talk: TalkSettings = TalkSettings()


class CoordinatorKeys(msgspec.Struct, frozen=True, kw_only=True, tag_field="of", tag="coordinator"):
    """CURVE keys of a group's engine 0, in Z85, 40 characters each."""

    secret: str
    allowed: tuple[str, ...]
    """Public keys of engine 1, 2 and so on, one for each. Each may join as that engine only."""


class MemberKeys(msgspec.Struct, frozen=True, kw_only=True, tag_field="of", tag="member"):
    """CURVE keys of any other engine of a group, in Z85, 40 characters each."""

    server: str
    """Engine 0's public key."""
    public: str
    secret: str


class GroupMembership(msgspec.Struct, frozen=True, kw_only=True):
    """This engine's place in a group: engines that step together, each with equally many replicas."""

    engine: int
    """Index from 0. Engine 0 listens, the others connect."""
    num_engines: int
    endpoint: str
    """Where engine 0 listens: an ``ipc://`` path in a directory of mode 0700, or with keys any ZeroMQ address."""
    keys: CoordinatorKeys | MemberKeys | None = None
    facts: dict[str, str] = {}
    """What the ranks compute with, by the name that a message shows; equal in all engines. The launch fills it in."""


class RemoteHost(msgspec.Struct, frozen=True, kw_only=True):
    """Another host with ranks of an engine."""

    public: str
    """CURVE key of its ranks, in Z85."""
    ranks: tuple[int, ...]
    """Those that the key speaks for; counted through all replicas."""


class RemoteWorkers(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks on other hosts."""

    endpoints: tuple[str, ...]
    """Where each replica listens for them: ``tcp://HOST:PORT``; ``*`` takes a free port."""
    secret: str
    """The engine's CURVE key, in Z85."""
    allowed: tuple[RemoteHost, ...]


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):  # budget: everything that the engine is told
    """Settings of the engine, as JSON; serde mirrors are `engine::settings` and `plait_core::settings`."""

    model: str
    """Folder or GGUF file; an absolute path."""
    served_model_name: str | None
    template: TemplateSettings
    run_dir: str
    """Folder of the ipc sockets; mode 0700."""
    num_ranks: int
    """Of each replica."""
    num_replicas: int
    max_model_len: int | None
    """None: the model's context."""
    scheduler: SchedulerSettings
    """With the batch sizes filled in."""
    pages: PageSettings
    """With the page size filled in."""
    draft_tokens: int
    """Speculative tokens of a decode row at most."""
    text_threads: int
    """Threads that tokenise."""
    seed: int | None
    step_trace: str | None
    load_timeout_seconds: float
    capture_timeout_seconds: float
    log_level: LogLevel
    log_json: bool
    group: GroupMembership | None
    """None: the engine steps on its own."""
    restarts_ranks: bool
    """A replica that loses its ranks waits for others."""
    remote_workers: RemoteWorkers | None
    """None: all ranks are on this host."""
    kv_events: KvEventsSettings
    hash_key: str | None
    """Key of the pages' hashes, 32 hexadecimal digits. None: random."""
    generation: GenerationSettings = GenerationSettings()
    deadlines: DeadlineSettings = DeadlineSettings()


def _default_text_threads() -> int:
    return max(2, min(8, len(os.sched_getaffinity(0)) // 4))


def engine_settings(
    settings: ServeSettings,
    model: str,
    name: str | None,
    run_dir: str,
    group: GroupMembership | None = None,
    hash_key: str | None = None,
    remote_workers: RemoteWorkers | None = None,
) -> EngineSettings:
    """The engine's settings; `name` is the model id unless the user gives one."""
    return EngineSettings(
        model=model,
        served_model_name=settings.http.served_model_name[0] if settings.http.served_model_name else name,
        template=settings.template,
        run_dir=run_dir,
        num_ranks=settings.process.tp,
        num_replicas=settings.process.dp,
        max_model_len=settings.model.max_model_len,
        scheduler=settings.scheduler,
        pages=settings.pages,
        draft_tokens=DRAFT_TOKENS,
        text_threads=settings.process.text_threads or _default_text_threads(),
        seed=settings.process.seed,
        step_trace=settings.process.step_trace,
        load_timeout_seconds=settings.process.load_timeout_seconds,
        capture_timeout_seconds=settings.process.capture_timeout_seconds,
        log_level=settings.process.log_level,
        log_json=settings.logs.log_json,
        group=group,
        restarts_ranks=settings.restarts.restart != "never",
        remote_workers=remote_workers,
        kv_events=settings.kv_events,
        hash_key=hash_key,
        generation=settings.generation,
        deadlines=settings.deadlines,
    )
