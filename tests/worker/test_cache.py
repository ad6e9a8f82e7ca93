"""Layers' pools in the KV cache: where a CPU's begin in memory, and one shape for each kind of layer."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from plait_worker.attention.spec import MhaShape, MlaShape
from plait_worker.cache import CacheSpec, KVCache, bytes_per_page

CPU = torch.device("cpu")
HUGE_PAGE = 2 << 20
PAGE_SIZE = 16


def heads(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[CacheSpec]:
    return [CacheSpec("full", MhaShape(num_kv_heads, num_kv_heads, head_dim, 1.0, dtype))] * num_layers


SMOLLM2 = heads(30, 3, 64, torch.bfloat16)
LATENTS = [CacheSpec("mla", MlaShape(8, 512, 576, 192, 128, 1.0, torch.bfloat16, torch.bfloat16))] * 61


@pytest.mark.parametrize(
    ("specs", "num_pages"),
    [
        (SMOLLM2, 40),
        (SMOLLM2, 2047),
        (heads(2, 2, 16, torch.float32), 3),
        (heads(16, 8, 128, torch.bfloat16), 2 * HUGE_PAGE // (1 << 16) - 1),  # each is whole huge pages
        (heads(64, 1, 64, torch.float8_e4m3fn), 1023),
        (LATENTS, 1000),
    ],
)
def test_layers_begin_in_places_of_their_own_in_huge_pages(specs: list[CacheSpec], num_pages: int) -> None:
    layers = KVCache(specs, num_pages, PAGE_SIZE, CPU).layers
    places = sorted(layer.data_ptr() % HUGE_PAGE for layer in layers)
    gaps = [after - before for before, after in pairwise([*places, places[0] + HUGE_PAGE])]
    assert min(gaps) >= HUGE_PAGE // (2 * len(specs))


def test_a_thousand_layers_share_places_as_little_as_can_be() -> None:
    layers = KVCache(heads(1000, 1, 16, torch.float32), 3, PAGE_SIZE, CPU).layers
    places = [layer.data_ptr() % HUGE_PAGE for layer in layers]
    assert max(map(places.count, places)) == 2


@pytest.mark.parametrize("num_pages", [3, 640])
def test_layers_lie_side_by_side_with_little_between(num_pages: int) -> None:
    cache = KVCache(SMOLLM2, num_pages, PAGE_SIZE, CPU)
    size = cache.layers[0].nbytes
    begins = sorted(layer.data_ptr() for layer in cache.layers)
    between = [after - before - size for before, after in pairwise(begins)]
    assert min(between) >= 0
    assert sum(between) <= 2 * HUGE_PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_layer_is_zeros_that_no_other_writes_to(dtype: torch.dtype) -> None:
    layers = KVCache(heads(3, 2, 32, dtype), 4, PAGE_SIZE, CPU).layers
    assert [layer.shape for layer in layers] == [(5, 2, 2, PAGE_SIZE, 32)] * 3
    assert all(layer.dtype == dtype for layer in layers)
    layers[1].copy_(torch.ones(layers[1].shape))
    assert [layer.float().sum().item() for layer in layers] == [0, layers[1].numel(), 0]


def test_each_kind_of_layer_has_pages_of_its_own_shape() -> None:
    mixed = [LATENTS[0], SMOLLM2[0], LATENTS[0]]
    cache = KVCache(mixed, 4, PAGE_SIZE, CPU)
    assert [tuple(layer.shape) for layer in cache.layers] == [(5, 16, 576), (5, 2, 3, 16, 64), (5, 16, 576)]
    assert bytes_per_page(mixed, PAGE_SIZE) == sum(layer[0].nbytes for layer in cache.layers)
    cache.layers[0].fill_(1)
    assert not cache.layers[1].any()
    assert not cache.layers[2].any()
