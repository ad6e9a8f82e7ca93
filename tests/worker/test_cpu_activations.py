"""A CPU's pages leave memory for the activations of the largest step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plait_testing.attention_cases import cpu_attention
from plait_testing.deepseek_v4 import CSA, HCA, V4Driver, random_v4
from plait_testing.tiny_models import config_for, save_tiny_llama
from plait_worker.cache import KVCache
from plait_worker.capacity import MemoryBudget, choose_num_pages, cpu_pool_bytes
from plait_worker.cpu_activations import cpu_activation_bytes
from plait_worker.errors import WorkerError
from plait_worker.models.loader import load_model, open_checkpoint
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows
from plait_worker.weights.cache_scales import Fp8Cache
from torch.profiler import ProfilerActivity, profile

CPU = torch.device("cpu")
NUM_TOKENS = 512
MOST_COUNTED = 4
"""Times what is taken."""
NOISE = 2 << 20
"""Bytes of a process that are nobody's arrays."""


@pytest.mark.parametrize(
    ("model_name", "dtype", "fp8"),
    [
        ("recall-mla", "bfloat16", None),
        ("recall-mla", "bfloat16", Fp8Cache()),
        ("recall-gqa", "bfloat16", None),
        ("recall-gqa", "bfloat16", Fp8Cache()),
        ("recall-gqa", "float16", None),
    ],
)
def test_a_step_takes_no_more_than_is_counted_and_not_much_less(
    model_name: str, dtype: str, fp8: Fp8Cache | None, check_models: Path, tmp_path: Path
) -> None:
    """What torch allocates at a time."""
    path = check_models / model_name
    config = config_for(path, tmp_path, max_batch_tokens=NUM_TOKENS, mla_context_chunk_size=256, max_model_len=1024)
    model = load_model(path, dtype, CPU, Parallel(), fp8=fp8)
    cache, attention = KVCache(model.cache_specs, 64, 16, CPU), cpu_attention(model.attention_specs, 16, 256)
    assert attention.uses_torch == (dtype == "float16" or fp8 is not None)
    table = torch.arange(64, dtype=torch.int32)[None]
    positions = torch.arange(256, 256 + NUM_TOKENS)
    rows = Rows(1, [0], [256], [NUM_TOKENS], torch.zeros_like(positions), positions, table, positions[-1:] - 256)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        model.logits(model.forward(rows, cache, attention.prepare(rows))[-8:])
    sizes = [event.self_cpu_memory_usage for event in sorted(seen.events(), key=lambda event: event.time_range.end)]
    held = peak = 0
    for size in sizes:
        held += size
        peak = max(peak, held)
    itemsize = model.attention_specs[0].cached_dtype.itemsize if attention.uses_torch else None
    counted = cpu_activation_bytes(config, model.config, model.dtype.itemsize, itemsize)
    assert peak <= counted <= MOST_COUNTED * peak


def test_deep_decode_rows_of_deepseek_v4_take_no_more_than_is_counted(tmp_path: Path) -> None:
    """Index keys and scores of 16 rows far into their contexts."""
    rates = {CSA: 4, HCA: 128}
    random_v4("mixed", compress_rates=rates, index_topk=64, sliding_window=128).save_pretrained(tmp_path)
    model, num, length = load_model(tmp_path, "float32", CPU, Parallel()), 16, 32_000
    config = config_for(tmp_path, tmp_path, max_batch_tokens=64, max_seqs=num, max_model_len=2 * length, page_size=128)
    driver = V4Driver(model, 128, num_pages=num * (length // 128 + 1), num_slots=num, max_tokens=64)
    driver.lengths = {str(number): length for number in range(num)}
    decoded = {str(number): 1 for number in range(num)}
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        driver.step({}, decoded)
    held = peak = 0
    for event in sorted(seen.events(), key=lambda event: event.time_range.end):
        held += event.self_cpu_memory_usage
        peak = max(peak, held)
    counted = cpu_activation_bytes(config, model.config, 4, 4)
    assert peak <= counted <= 16 * peak


ONE_STEP = """
import ctypes
import sys
from pathlib import Path

import torch
from plait_worker.attention.backend import requirements_for
from plait_worker.attention.selection import choose_attention
from plait_worker.cache import KVCache
from plait_worker.models.loader import load_model
from plait_worker.parallel import Parallel
from plait_worker.rows import Rows

CPU = torch.device("cpu")
PR_SET_THP_DISABLE = 41

def memory(name):
    status = Path("/proc/self/status").read_text()
    return int(status.partition(name + ":")[2].split()[0]) * 1024

def measure(path, num_tokens):
    model = load_model(Path(path), "bfloat16", CPU, Parallel())
    table = torch.arange((256 + num_tokens) // 16, dtype=torch.int32)[None]
    cache = KVCache(model.cache_specs, table.numel(), 16, CPU)
    attention = choose_attention("auto", requirements_for(model.attention_specs, 16, 256, 0, CPU))
    for pages in cache.layers:
        pages.zero_()
    with torch.inference_mode():
        for count in (16, num_tokens):
            before, files, peak = memory("VmRSS"), memory("RssFile"), memory("VmHWM")
            positions = torch.arange(256, 256 + count)
            rows = Rows(1, [0], [256], [count], torch.zeros_like(positions), positions, table, positions[-1:] - 256)
            model.logits(model.forward(rows, cache, attention.prepare(rows))[-8:])
    assert memory("VmHWM") > peak, "an earlier step, or loading, took more"
    return memory("VmHWM") - before - (memory("RssFile") - files)

ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
print(*(measure(path, int(sys.argv[1])) for path in sys.argv[2:]))
"""
"""Prints by how much the process grew in its largest step, for each model.

Huge pages are off, and pages of files are left out: how many a touch maps is the machine's.
"""


def test_a_process_grows_in_its_largest_step_by_no_more_than_is_counted(check_models: Path, tmp_path: Path) -> None:
    """The kernels' own arrays and all, in a process that has taken no larger step.

    Its C library is told to give back what is freed: what it would keep is not counted.
    """
    num_tokens = 1536
    paths = [check_models / name for name in ("recall-gqa", "recall-mla")]
    command = [sys.executable, "-c", ONE_STEP, str(num_tokens), *map(str, paths)]
    gives_back = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | gives_back)
    assert ran.returncode == 0, ran.stderr
    for path, grown in zip(paths, map(int, ran.stdout.split()), strict=True):
        config = config_for(path, tmp_path, max_batch_tokens=num_tokens, mla_context_chunk_size=256, max_model_len=8192)
        counted = cpu_activation_bytes(config, open_checkpoint(path).config, torch.bfloat16.itemsize)
        assert grown - NOISE <= counted <= MOST_COUNTED * grown, path.name


def test_pages_that_leave_no_memory_for_a_step_are_rejected(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    config = config_for(tmp_path, tmp_path)
    working = cpu_activation_bytes(config, load_model(tmp_path, "float32", CPU, Parallel()).config, 4)
    page, needed = 1000, 32 * 1000
    budget = MemoryBudget(4 * (working + needed), 0, working)
    assert choose_num_pages(config, page, cpu_pool_bytes(config, budget), budget) >= 32
    tight = MemoryBudget(working + needed - 1, 0, working)
    with pytest.raises(WorkerError, match="a step takes"):
        choose_num_pages(config, page, cpu_pool_bytes(config, tight), tight)


def test_num_pages_beyond_the_memory_is_rejected_with_what_to_do(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    config = config_for(tmp_path, tmp_path, num_pages=10)
    budget = MemoryBudget(free_bytes=2 << 30, weight_bytes=0, activation_bytes=3 << 30)
    with pytest.raises(WorkerError) as refused:
        choose_num_pages(config, 1 << 20, 0, budget)
    assert str(refused.value) == (
        "--num-pages 10 needs 0.01 GiB, and 0.00 GiB are there for pages (2.00 GiB of memory are free, a step takes "
        "3.00 GiB): at most 0 pages fit; lower --num-pages or --max-batch-tokens"
    )
    assert choose_num_pages(config, 1 << 20, 0, MemoryBudget((3 << 30) + (10 << 20), 0, 3 << 30)) == 10
