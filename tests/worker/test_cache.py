"""Where the pools of a CPU's cache lie."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from plait_worker.cache import CacheSpec, KVCache, MlaCacheSpec

CPU = torch.device("cpu")
HUGE_PAGE = 2 << 20
PAGE_SIZE = 16
HEADS = CacheSpec(30, 3, 64, torch.bfloat16)
"""SmolLM2-135M's."""


@pytest.mark.parametrize(
    ("spec", "num_pages"),
    [
        (HEADS, 40),
        (HEADS, 2047),
        (CacheSpec(2, 2, 16, torch.float32), 3),
        (CacheSpec(16, 8, 128, torch.bfloat16), 2 * HUGE_PAGE // (1 << 16) - 1),  # each is whole huge pages
        (CacheSpec(64, 1, 64, torch.float8_e4m3fn), 1023),
        (MlaCacheSpec(61, 576, torch.bfloat16), 1000),
    ],
)
def test_layers_begin_in_places_of_their_own_in_huge_pages(spec: CacheSpec | MlaCacheSpec, num_pages: int) -> None:
    layers = KVCache(spec, num_pages, PAGE_SIZE, CPU).layers
    places = sorted(layer.data_ptr() % HUGE_PAGE for layer in layers)
    gaps = [after - before for before, after in pairwise([*places, places[0] + HUGE_PAGE])]
    assert min(gaps) >= HUGE_PAGE // (2 * spec.num_layers)


def test_a_thousand_layers_share_places_as_little_as_can_be() -> None:
    layers = KVCache(CacheSpec(1000, 1, 16, torch.float32), 3, PAGE_SIZE, CPU).layers
    places = [layer.data_ptr() % HUGE_PAGE for layer in layers]
    assert max(map(places.count, places)) == 2


@pytest.mark.parametrize("num_pages", [3, 640])
def test_layers_lie_side_by_side_with_little_between(num_pages: int) -> None:
    cache = KVCache(HEADS, num_pages, PAGE_SIZE, CPU)
    size = cache.layers[0].nbytes
    begins = sorted(layer.data_ptr() for layer in cache.layers)
    between = [after - before - size for before, after in pairwise(begins)]
    assert min(between) >= 0
    assert sum(between) <= 2 * HUGE_PAGE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_layer_is_zeros_that_no_other_writes_to(dtype: torch.dtype) -> None:
    layers = KVCache(CacheSpec(3, 2, 32, dtype), 4, PAGE_SIZE, CPU).layers
    assert [layer.shape for layer in layers] == [(5, 2, 2, PAGE_SIZE, 32)] * 3
    assert all(layer.dtype == dtype for layer in layers)
    layers[1].copy_(torch.ones(layers[1].shape))
    assert [layer.float().sum().item() for layer in layers] == [0, layers[1].numel(), 0]
