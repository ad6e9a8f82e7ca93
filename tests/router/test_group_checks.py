"""What all engines of a group must be given alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from plait.launch.group_checks import with_facts
from plait.model_files import LocalModel
from plait.settings import (
    AttentionSettings,
    DeviceSettings,
    GroupMembership,
    KvCacheSettings,
    ModelSettings,
    ProcessSettings,
    ServeSettings,
)


def facts_of(folder: Path, settings: ServeSettings) -> dict[str, str]:
    return with_facts(GroupMembership(engine=0, num_engines=2, endpoint=""), LocalModel(folder, None), settings).facts


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (ServeSettings(model=ModelSettings(dtype="float32")), "--dtype"),
        (ServeSettings(process=ProcessSettings(dp_attention=True)), "--dp-attention"),
        (ServeSettings(attention=AttentionSettings(mla_context_chunk_size=64)), "--mla-context-chunk-size"),
        (ServeSettings(kv_cache=KvCacheSettings(kv_cache_dtype="fp8")), "--kv-cache-dtype"),
        (ServeSettings(device=DeviceSettings(device="cpu")), "--device"),
        (ServeSettings(device=DeviceSettings(cuda_graphs=False)), "--cuda-graphs"),
        (ServeSettings(device=DeviceSettings(cuda_graph_max_bs=8)), "--cuda-graph-max-bs"),
        (ServeSettings(device=DeviceSettings(custom_all_reduce=False)), "--custom-all-reduce"),
    ],
)
def test_a_setting_that_ranks_must_share_is_compared(settings: ServeSettings, name: str, tmp_path: Path) -> None:
    """Ranks whose settings differ would wait for each other before they could tell."""
    usual, given = facts_of(tmp_path, ServeSettings()), facts_of(tmp_path, settings)
    assert {fact for fact in given if given[fact] != usual[fact]} == {name}
