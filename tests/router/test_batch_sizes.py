"""Batch sizes follow from the device, its memory and the model, unless the user gives them."""

import json
import re
from functools import partial
from pathlib import Path

import msgspec
import pytest
from plait.batch_sizes import with_batch_sizes
from plait.gpu_sizes import BATCH_TOKENS, MAX_SEQS, MIN_SEQS, ModelSize, gpu_sizes, kv_copies
from plait.settings import (
    DeviceSettings,
    ModelSettings,
    PageSettings,
    ProcessSettings,
    SchedulerSettings,
    ServeSettings,
)

SHAPES = Path(__file__).parents[2] / "router" / "sim" / "data" / "models"
H200, H100, L4 = 150_754_820_096, 85_520_809_984, 24_152_899_584
ON_GPU = ServeSettings(device=DeviceSettings(device="cuda"))
NO_MODEL = Path("/there/is/no/model")


def folder(shape: str, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text((SHAPES / f"{shape}.json").read_text())
    return tmp_path


@pytest.mark.parametrize(
    ("shape", "memory", "max_seqs", "max_batch_tokens"),
    [
        ("qwen3-8b", H200, 1024, 4096),
        ("qwen3-8b", H100, 768, 4096),
        ("qwen3-8b", L4, 64, 2048),
        ("deepseek-v2-lite", H200, 1024, 8192),
        ("deepseek-v2-lite", H100, 1024, 8192),
    ],
)
def test_a_gpu_gets_what_its_memory_holds_and_its_cores_compute_in_time(
    shape: str, memory: int, max_seqs: int, max_batch_tokens: int, tmp_path: Path
) -> None:
    settings, reason = with_batch_sizes(ON_GPU, folder(shape, tmp_path), lambda: memory)
    assert (settings.scheduler.max_seqs, settings.scheduler.max_batch_tokens) == (max_seqs, max_batch_tokens)
    assert "tokens of KV cache" in reason
    assert "GFLOP" in reason


def test_quantised_weights_leave_room_for_more_requests_where_gpus_hold_them_so(tmp_path: Path) -> None:
    eight = msgspec.structs.replace(ON_GPU, process=ProcessSettings(tp=8))
    sizes = [
        with_batch_sizes(eight, folder("deepseek-v3", tmp_path), lambda: H200, partial(bool, keeps))[0]
        for keeps in (True, False)
    ]
    assert sizes[0].scheduler.max_seqs == 1024
    assert sizes[1].scheduler.max_seqs == MIN_SEQS


@pytest.mark.parametrize(("model", "keeps"), [({"quantization": "fp8"}, True), ({"dtype": "bfloat16"}, False)])
def test_weights_have_the_size_that_the_settings_give_them(model: dict[str, str], keeps: bool, tmp_path: Path) -> None:
    stored = {"quantization_config": {"quant_method": "fp8"}} if "dtype" in model else {}
    (tmp_path / "config.json").write_text(json.dumps(json.loads((SHAPES / "qwen3-8b.json").read_bytes()) | stored))
    settings = msgspec.structs.replace(ON_GPU, model=msgspec.convert(model, type=ModelSettings))
    said = kv_tokens_said(with_batch_sizes(settings, tmp_path, lambda: L4, lambda: True)[1])
    weights = 9.44e9 if keeps else 16.38e9
    assert said == pytest.approx((L4 * 0.9 - weights) / 147_456, rel=0.01)


def test_a_smaller_share_of_the_memory_holds_fewer_requests(tmp_path: Path) -> None:
    half = msgspec.structs.replace(ON_GPU, pages=PageSettings(memory_fraction=0.45))
    settings, _ = with_batch_sizes(half, folder("qwen3-8b", tmp_path), lambda: H200)
    assert settings.scheduler.max_seqs == 640


def test_a_cpu_gets_small_batches() -> None:
    settings, reason = with_batch_sizes(ServeSettings(device=DeviceSettings(device="cpu")), NO_MODEL, lambda: H200)
    assert (settings.scheduler.max_seqs, settings.scheduler.max_batch_tokens) == (64, 160)
    assert "CPU" in reason


def test_what_the_user_gives_stays(tmp_path: Path) -> None:
    both = ServeSettings(scheduler=SchedulerSettings(max_seqs=3, max_batch_tokens=7))
    assert with_batch_sizes(both, NO_MODEL, lambda: H200) == (both, "as given")
    one = ServeSettings(device=DeviceSettings(device="cuda"), scheduler=SchedulerSettings(max_seqs=3))
    settings, _ = with_batch_sizes(one, folder("qwen3-8b", tmp_path), lambda: H200)
    assert (settings.scheduler.max_seqs, settings.scheduler.max_batch_tokens) == (3, 4096)


@pytest.mark.parametrize("config", ["{}", "no JSON", json.dumps({"hidden_size": -1})])
def test_an_unknown_size_gives_the_smallest_batches_and_says_so(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    settings, reason = with_batch_sizes(ON_GPU, tmp_path, lambda: H200)
    assert (settings.scheduler.max_seqs, settings.scheduler.max_batch_tokens) == (MIN_SEQS, BATCH_TOKENS[-1])
    assert "model's size is unknown" in reason


def test_unknown_memory_gives_the_smallest_batches_and_says_so(tmp_path: Path) -> None:
    settings, reason = with_batch_sizes(ON_GPU, folder("qwen3-8b", tmp_path), lambda: None)
    assert (settings.scheduler.max_seqs, settings.scheduler.max_batch_tokens) == (MIN_SEQS, BATCH_TOKENS[-1])
    assert "memory is unknown" in reason


def test_ranks_divide_the_work_and_add_their_memory() -> None:
    model = ModelSize(weight_bytes=140e9, parameters_per_token=70e9, kv_bytes_per_token=327_680, hidden_size=8192)
    one, eight = gpu_sizes(model, H200, 1), gpu_sizes(model, H200, 8)
    assert (one.max_seqs, one.max_batch_tokens) == (MIN_SEQS, 2048)
    assert (eight.max_seqs, eight.max_batch_tokens) == (MAX_SEQS, 4096)


def test_ranks_divide_key_value_heads_and_copy_the_cache_of_mla(tmp_path: Path) -> None:
    assert kv_copies({"num_key_value_heads": 8, "num_attention_heads": 32}, 4) == 1
    assert kv_copies({"num_key_value_heads": 2, "num_attention_heads": 16}, 8) == 4
    assert kv_copies({"kv_lora_rank": 512, "num_attention_heads": 16}, 8) == 8
    two = msgspec.structs.replace(ON_GPU, process=ProcessSettings(tp=2))
    tokens = [
        kv_tokens_said(with_batch_sizes(settings, folder("deepseek-v2-lite", tmp_path), lambda: L4 * 2)[1])
        for settings in (ON_GPU, two)
    ]
    weights, usable, token = 31.4e9, L4 * 2 * 0.9, 31_104
    assert tokens[0] == pytest.approx((usable - weights) / token, rel=0.01)
    assert tokens[1] == pytest.approx((usable - weights / 2) / token, rel=0.01)


def kv_tokens_said(reason: str) -> int:
    found = re.search(r"leave ([\d,]+) tokens of KV cache", reason)
    assert found is not None
    return int(found[1].replace(",", ""))
