"""From a configuration to a rank that is ready for plans."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from plait_proto import (
    PROTOCOL,
    SCHEMA_FINGERPRINT,
    CapturedSize,
    ExitCode,
    Hello,
    Welcome,
    WorkerConfig,
    config_fingerprint,
    encode,
)

from plait_worker.agreement import check_agreement, warn_of_uneven_pages
from plait_worker.attention.backend import UnplannedPrefill, requirements_for
from plait_worker.attention.model_attention import ModelAttention
from plait_worker.attention.selection import choose_attention
from plait_worker.cache import KVCache, bytes_per_page
from plait_worker.capacity import MemoryBudget, cpu_pool_bytes, gpu_pool_bytes
from plait_worker.cpu_activations import cpu_activation_bytes
from plait_worker.device import device_facts, free_device_bytes, open_device
from plait_worker.errors import ModelFilesError, WorkerError, first_line, is_out_of_memory
from plait_worker.fingerprint import check_same_files
from plait_worker.graph_sizes import DECODE_ROWS, GraphSize, capture_sizes
from plait_worker.graphs import Captured, StepGraphs, capture
from plait_worker.link import Link
from plait_worker.machine import free_memory_bytes
from plait_worker.models.loader import dummy_model, load_model
from plait_worker.models.model import Model
from plait_worker.parallel import Parallel
from plait_worker.pools import check_cache, choose_pools, state_bytes
from plait_worker.profile_run import fill_allocators, measure_activation_bytes
from plait_worker.rank import Rank
from plait_worker.rendezvous import check_rank, connect_gpus, init_parallel, open_peers
from plait_worker.rows import Rows
from plait_worker.slot_state import StateSizes
from plait_worker.slots import Slots
from plait_worker.torch_threads import limit_torch_threads
from plait_worker.warm_up import StepLimits, warm_up_steps
from plait_worker.weights.cache_scales import Fp8Cache

_log = logging.getLogger(__name__)

_PEER_SECONDS = 5.0
"""After which a rank that serves gives another up. Nothing is compiled any more; what waits so long is stopped."""


@dataclass(frozen=True, slots=True)
class Member:
    """A rank that has met the others: they have the same kind of device, and can exchange its tensors."""

    rank: int
    """Among all ranks of the engine."""
    device: torch.device
    device_name: str
    parallel: Parallel


@dataclass(frozen=True)
class Loaded:
    """A rank's state before the engine's Welcome."""

    config: WorkerConfig
    member: Member
    model: Model[Any]
    attention: ModelAttention

    @cached_property
    def graph_sizes(self) -> Sequence[GraphSize]:
        """Of the steps that it captures, smallest first."""
        return _graph_sizes(self)


def start(link: Link, config: WorkerConfig, config_bytes: bytes, rank: int) -> Rank | None:
    """Load the model, say Hello, and allocate what Welcome says; None if the engine drains instead.

    Raises ``WorkerError`` if one of these fails.
    """
    loaded = load(config, join_ranks(config, rank, link))
    with _log_duration("memory"):
        hello = _hello(loaded, config_bytes)
    warn_of_uneven_pages(hello.num_pages, loaded.member.parallel)
    link.send(encode(hello))
    welcome = link.welcome()
    if welcome is None:
        return None
    _log.info(
        "rank %d of %d on %s: %d pages", rank, config.parallel.num_ranks, loaded.member.device_name, welcome.num_pages
    )
    return allocate(loaded, welcome)


def join_ranks(config: WorkerConfig, rank: int, link: Link | None = None) -> Member:
    """Open the device and join the other ranks, by way of the engine if they are on several hosts.

    Raises ``WorkerError`` if one of these fails, or if devices differ.
    """
    check_rank(config, rank)
    device, device_name = open_device(config, rank)
    with _log_duration("ranks"):
        parallel = init_parallel(config, rank, device, link)
        check_agreement(device_facts(device), parallel.everyone)
        connect_gpus(parallel.everyone, device)
    return Member(rank, device, device_name, parallel)


def load(config: WorkerConfig, member: Member) -> Loaded:
    """Load the model and choose its attention, the same on every rank. Raises ``WorkerError`` if one of these fails."""
    _check_drafts(config)
    device, parallel = member.device, member.parallel
    with _log_duration("weights"):
        model = _load_model(config, device, parallel)
    check_cache(config, model, device.type)
    max_tokens = _max_tokens(config)
    open_peers(parallel, device, model.config, model.dtype, max_tokens, config.device.custom_all_reduce)
    requirements = requirements_for(
        model.attention_specs, config.pages.page_size, config.attention.mla_context_chunk_size, max_tokens, device
    )
    with _log_duration("attention"):
        attention = choose_attention(config.attention.attention_backend, requirements, parallel.everyone)
    if device.type == "cpu":
        limit_torch_threads(model, attention)
    check_agreement(_step_facts(config, model, attention), parallel.everyone)
    return Loaded(config, member, model, attention)


def _max_tokens(config: WorkerConfig) -> int:
    """Of one step, padding included."""
    return config.max_batch_tokens + config.max_seqs


def _step_facts(config: WorkerConfig, model: Model[Any], attention: ModelAttention) -> dict[str, str]:
    """What decides which steps a rank captures and which kernels they call."""
    prompts = attention.captured_prefill
    return {
        "attention backend": attention.name,
        "captured steps": "none" if not attention.is_capturable else "decode" if prompts is None else "all",
        "cached tokens of captured prompts": "" if prompts is None else ", ".join(map(str, prompts.contexts)),
        "dtype": _dtype_in_words(model),
        "--tp": str(config.parallel.world),
        "--max-batch-tokens": str(config.max_batch_tokens),
        "--max-seqs": str(config.max_seqs),
        "--cuda-graphs": str(config.device.cuda_graphs),
        "--custom-all-reduce": str(config.device.custom_all_reduce),
    }


def _check_drafts(config: WorkerConfig) -> None:
    if config.draft_tokens != 0:
        raise WorkerError(
            ExitCode.SETTINGS,
            f"draft_tokens is {config.draft_tokens}: no attention backend of this worker verifies drafts; set it to 0",
        )


def allocate(loaded: Loaded, welcome: Welcome) -> Rank:
    """Allocate the cache and the slots, capture the graphs, and on a GPU run the warm-up."""
    config, model = loaded.config, loaded.model
    state = StateSizes(welcome.num_slots, _max_tokens(config), welcome.num_snapshots, config.draft_tokens)
    cache = KVCache(model.cache_specs, welcome.num_pages, config.pages.page_size, loaded.member.device, state)
    slots = Slots(
        welcome.num_slots,
        welcome.num_pages,
        config.pages.page_size,
        config.max_model_len,
        loaded.member.device,
        model.config.vocab_size,
    )
    graphs = _capture(loaded, cache, slots)
    ready = Rank(model, cache, loaded.attention, slots, loaded.member.parallel, graphs)
    if loaded.member.device.type == "cuda":
        with _log_duration("profile run"):
            fill_allocators(config, model, loaded.attention, cache)
        with _log_duration("warm-up"):
            for inputs in warm_up_steps(StepLimits(config.max_batch_tokens, slots.num_slots, config.max_model_len)):
                ready.try_step(inputs)
        loaded.member.parallel.everyone.wait_for_all()
        _log.info("memory left: %.1f GB", free_device_bytes(loaded.member.device) / 1e9)
    loaded.member.parallel.peers.limit_waits(_PEER_SECONDS)
    # What is alive now stays alive: the garbage collector need not visit it again.
    gc.collect()
    gc.freeze()
    return ready


@contextmanager
def _log_duration(name: str) -> Iterator[None]:
    """Log the seconds of a phase of the start."""
    began = time.perf_counter()
    yield
    _log.info("%s: %.1f s", name, time.perf_counter() - began)


def _load_model(config: WorkerConfig, device: torch.device, parallel: Parallel) -> Model[Any]:
    """The model. Every rank checks its files and measures free memory before any rank loads."""
    path, free_bytes = Path(config.model), _free_bytes(device)
    try:
        check_same_files(path, parallel.everyone)
        load_weights = dummy_model if config.load_format == "dummy" else load_model
        model = load_weights(
            path,
            config.dtype,
            device,
            parallel,
            free_bytes,
            _fp8(config),
            config.max_model_len,
            quantises=config.quantization == "fp8",
        )
    except ModelFilesError as error:
        raise WorkerError(ExitCode.MODEL_FILES, str(error)) from error
    except ValueError as error:
        raise WorkerError(ExitCode.SETTINGS, str(error)) from error
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise WorkerError(
            ExitCode.HARDWARE,
            f"the weights do not fit into memory, of which {free_bytes / 2**30:.2f} GiB were free: "
            f"{first_line(error)}; serve a smaller model, or a smaller --dtype",
        ) from error
    parallel.everyone.wait_for_all()
    return model


def _fp8(config: WorkerConfig) -> Fp8Cache | None:
    """None for a cache in the model's own type."""
    asked = Fp8Cache(config.kv_cache.k_scale, config.kv_cache.v_scale)
    if config.kv_cache.kv_cache_dtype == "fp8":
        return asked
    if asked != Fp8Cache():
        raise ValueError("--k-scale and --v-scale are for an FP8 cache; add --kv-cache-dtype fp8, or leave them out")
    return None


def _free_bytes(device: torch.device) -> int:
    """Of the device's memory."""
    return free_memory_bytes() if device.type == "cpu" else free_device_bytes(device)


def _hello(loaded: Loaded, config_bytes: bytes) -> Hello:
    config, model = loaded.config, loaded.model
    page_bytes = bytes_per_page(model.cache_specs, config.pages.page_size)
    pools = choose_pools(config, page_bytes, state_bytes(config, model), *_budget(loaded))
    return Hello(
        protocol=PROTOCOL,
        schema=SCHEMA_FINGERPRINT,
        config=config_fingerprint(config_bytes),
        rank=loaded.member.rank,
        world=config.parallel.num_ranks,
        pid=os.getpid(),
        device=f"{loaded.member.device_name}, {loaded.attention.name} attention",
        dtype=_dtype_in_words(model),
        num_pages=pools.num_pages,
        page_bytes=page_bytes,
        weight_bytes=model.weight_bytes,
        graphs=tuple(
            CapturedSize(size.prompt_tokens, size.prompt_rows, size.decode_rows, size.context_tokens)
            for size in loaded.graph_sizes
        ),
        slot_state=pools.slot_state,
    )


def _dtype_in_words(model: Model[Any]) -> str:
    """The model's type, and the types of quantised weights."""
    kinds = " and ".join(sorted(model.quantised_types))
    return str(model.dtype).removeprefix("torch.") + (f" with {kinds} weights" if kinds else "")


def _budget(loaded: Loaded) -> tuple[int, MemoryBudget]:
    """Bytes for the pools of pages and of slot state, and what they come from."""
    config, model = loaded.config, loaded.model
    if loaded.member.device.type == "cpu":
        activation_bytes = cpu_activation_bytes(config, model.config, model.dtype.itemsize, _gathered_itemsize(loaded))
        budget = MemoryBudget(
            _free_bytes(loaded.member.device) // config.parallel.num_local_ranks, model.weight_bytes, activation_bytes
        )
        return cpu_pool_bytes(config, budget), budget
    try:
        activation_bytes = measure_activation_bytes(
            config, model, loaded.attention, loaded.member.device, loaded.graph_sizes
        )
    except torch.OutOfMemoryError as error:
        raise WorkerError(
            ExitCode.HARDWARE,
            f"a step of {config.max_batch_tokens} tokens does not fit: {error}; lower --max-batch-tokens or --max-seqs",
        ) from error
    budget = MemoryBudget(_free_bytes(loaded.member.device), model.weight_bytes, activation_bytes)
    return gpu_pool_bytes(config, budget), budget


def _gathered_itemsize(loaded: Loaded) -> int | None:
    """Bytes of an element in the pages, if attention copies them."""
    specs = loaded.model.attention_specs
    return max(spec.cached_dtype.itemsize for spec in specs) if loaded.attention.uses_torch else None


def _graph_sizes(loaded: Loaded) -> list[GraphSize]:
    """Of the steps that are captured, smallest first."""
    config, attention, parallel = loaded.config, loaded.attention, loaded.member.parallel
    if loaded.member.device.type == "cpu" or not config.device.cuda_graphs:
        return []
    if parallel.experts is not None and parallel.peers.exchange is None:
        _log.warning(
            "the host counts the rows of --dp-attention without the exchange over peers' memory: no CUDA graphs"
        )
        return []
    if not attention.is_capturable:
        _log.warning("%s attention plans each step on the host: no CUDA graphs", attention.name)
        return []
    prompts = attention.captured_prefill
    contexts = () if prompts is None else prompts.contexts
    max_rows = min(config.device.cuda_graph_max_bs or DECODE_ROWS[-1], config.max_seqs)
    max_tokens = 0 if prompts is None else config.max_batch_tokens
    sizes = capture_sizes(max_rows, max_tokens, contexts)
    # Replicas that share experts agree on graphs of no more tokens than a step may have.
    return sizes if parallel.experts is None else [size for size in sizes if size.num_tokens <= config.max_batch_tokens]


def _capture(loaded: Loaded, cache: KVCache, slots: Slots) -> StepGraphs:
    if not loaded.graph_sizes:
        return StepGraphs()
    model, attention = loaded.model, loaded.attention

    def compute(rows: Rows, logits_RU: torch.Tensor) -> None:
        hidden_TD = model.forward(rows, cache, attention.prepare(rows))
        model.shard_logits(hidden_TD[rows.sample_index_S], logits_RU)

    prompts = attention.captured_prefill or UnplannedPrefill()
    most_rows = max(size.num_rows for size in loaded.graph_sizes)
    shard = -(-model.config.vocab_size // loaded.config.parallel.world)
    logits_RU = torch.empty(most_rows, shard, dtype=model.dtype, device=slots.device)
    shared = Captured(slots, compute, model.greedy_ids, logits_RU, model.config.vocab_size, prompts)
    return capture(loaded.graph_sizes, shared)
