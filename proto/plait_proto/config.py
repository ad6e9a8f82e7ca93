"""The file that the engine's command line writes for one worker process, and the worker reads once."""

from __future__ import annotations

import msgspec


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a rank computes on, and how."""

    kind: str
    """``auto``, ``cpu`` or ``cuda``."""
    attention: str
    """``auto``, or a backend that ``plait_worker.attention.registry`` lists, or ``torch``."""
    cuda_graphs: bool
    """Whether decode steps are captured."""
    cuda_graph_max_bs: int
    """Rows of the largest captured step."""


class KvCacheConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How keys and values are kept."""

    dtype: str
    """``auto`` for the model's own, or ``fp8``: float8_e4m3fn."""
    k_scale: float
    """What a cached number of float8 stands for, over the number itself; above 0."""
    v_scale: float


# budget: one field a setting
class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that a rank is told before it dials; the same for all ranks of a replica.

    Its bytes are part of the handshake (``proto/README.md``), so a stranger's worker is refused.
    """

    model: str
    """Folder with config.json and safetensors, or one GGUF file; an absolute path."""
    run_dir: str
    """Directory of mode 0700 that holds the ipc socket and the ranks' rendezvous file."""
    world: int
    """Ranks of this replica (tensor parallelism)."""
    device: DeviceConfig
    load_format: str
    """``auto``, or ``dummy`` for random weights of the configuration's shape."""
    dtype: str
    """``auto``, ``float32``, ``bfloat16`` or ``float16``."""
    kv_cache: KvCacheConfig
    page_size: int
    """Tokens in a page."""
    num_pages: int | None
    """Pages asked for; None lets the worker measure."""
    memory_fraction: float | None
    """Share of the free memory for weights and pages; None takes the device's own rule."""
    max_model_len: int
    """Longest prompt plus output, in tokens."""
    max_batch_tokens: int
    """Tokens in one step at most."""
    max_seqs: int
    """Slots."""
    mla_context_chunk_size: int
    """Cached tokens that a prefill row of latent attention attends to at a time."""
    threads: int | None
    """Threads of a CPU rank; None takes the cores that this process may use, shared among the ranks."""
    log_level: str
    """``debug``, ``info``, ``warning`` or ``error``."""


def encode_config(config: WorkerConfig) -> bytes:
    """The file's bytes."""
    return msgspec.json.format(msgspec.json.encode(config))


def decode_config(raw: bytes) -> WorkerConfig:
    """The configuration in a file's bytes; raises ``msgspec.ValidationError`` that names the field."""
    return msgspec.json.decode(raw, type=WorkerConfig)
