"""The file that the engine's command line writes for one worker process, and the worker reads once."""

from __future__ import annotations

import msgspec


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank computes on."""

    device: str
    """``auto``, ``cpu`` or ``cuda``."""
    cuda_graphs: bool
    """Whether decode steps are captured."""
    cuda_graph_max_bs: int | None
    """Rows of the largest captured step; None means all slots, as far as sizes are listed."""
    custom_all_reduce: bool
    """Whether ranks on GPUs may reduce through each other's memory; else NCCL does."""


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which attention the layers use."""

    attention_backend: str
    """``auto``, or a backend that ``plait_worker.attention.registry`` lists, or ``torch``."""
    mla_context_chunk_size: int
    """Cached tokens that an MLA prefill row attends to at a time."""


class KvCacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How keys and values are stored."""

    kv_cache_dtype: str
    """``auto`` for the model's own, or ``fp8``: float8_e4m3fn."""
    k_scale: float | None
    """FP8 scale of keys, above 0: value = stored * scale; None for those of the files, or 1."""
    v_scale: float | None


MAX_PAGE_SIZE = 1024
"""Tokens."""


class PageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool of KV pages."""

    page_size: int
    """Tokens in a page."""
    num_pages: int | None
    """Pages asked for; None lets the worker measure."""
    num_snapshots: int | None = None
    """Snapshots of slot state asked for; None takes an eighth of what pages take."""
    memory_fraction: float | None
    """Share of the free memory for weights and pages; None takes the device's own rule."""


class SharedExperts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine's part in a group of engines whose replicas share their experts."""

    first_replica: int
    """Of this engine, among those of the group."""
    num_replicas: int
    """Of all engines."""


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ranks of an engine, numbered through its replicas."""

    world: int
    """Ranks of each replica (tensor parallelism)."""
    dp: int
    """Replicas."""
    dp_attention: bool
    """The replicas share their experts."""
    group: SharedExperts | None = None
    """The engines whose replicas share them, if this is not the only one."""
    meets_by_engine: bool = False
    """Ranks that compute together are on several hosts, or of several engines: they meet by way of their engines."""
    ranks_per_host: int | None = None
    """Ranks of the engine on each of its hosts, in order; None if all are on one."""

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return self.world * self.dp

    @property
    def num_local_ranks(self) -> int:
        """Those that share a host with any one of them."""
        return self.num_ranks if self.ranks_per_host is None else self.ranks_per_host


# budget: one field a setting of a rank, grouped where several go together
class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a rank is given before it dials; the same for all ranks of an engine.

    Its bytes are part of the handshake (``proto/README.md``): a worker of another run is rejected.
    """

    model: str
    """Folder with config.json and safetensors, or one GGUF file; an absolute path."""
    run_dir: str
    """Directory of mode 0700 that holds the ipc sockets and the ranks' rendezvous files, on the engine's host."""
    parallel: ParallelConfig
    load_format: str
    """``auto``, or ``dummy`` for random weights of the configuration's shape."""
    dtype: str
    """``auto``, ``float32``, ``bfloat16`` or ``float16``."""
    quantization: str
    """``auto`` for weights as the files have them, or ``fp8`` to quantise them while they are read."""
    device: DeviceConfig
    attention: AttentionConfig
    kv_cache: KvCacheConfig
    pages: PageConfig
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    max_batch_tokens: int
    """Tokens in one step at most."""
    max_seqs: int
    """Slots."""
    draft_tokens: int
    """Speculative tokens of a decode row at most; 0 decodes one token a row."""
    threads: int | None
    """Threads of a CPU rank; None divides the cores of this process among the ranks."""
    log_level: str
    """``debug``, ``info``, ``warning`` or ``error``."""


def encode_config(config: WorkerConfig) -> bytes:
    """The file's bytes."""
    return msgspec.json.format(msgspec.json.encode(config))


def decode_config(raw: bytes) -> WorkerConfig:
    """The configuration in a file's bytes; raises ``msgspec.ValidationError`` that names the field."""
    return msgspec.json.decode(raw, type=WorkerConfig)
