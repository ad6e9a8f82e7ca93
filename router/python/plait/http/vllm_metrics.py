"""vLLM's names for our metrics, with our values: `--metric-names plait,vllm`.

Names and labels are those of vLLM 0.11's Prometheus page. `engine` is the replica.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_SAMPLE = re.compile(r"\w+?(?P<suffix>_total|_bucket|_count|_sum)?(?:\{(?P<labels>.*)\})? (?P<value>\S+)")


class _Family(NamedTuple):
    """A metric of ours as the page has it."""

    kind: str
    help: str
    samples: list[re.Match[str]]


NAMES: dict[str, tuple[str, ...]] = {
    "plait_requests_running": ("vllm:num_requests_running",),
    "plait_requests_waiting": ("vllm:num_requests_waiting",),
    "plait_kv_usage_ratio": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "plait_preemptions": ("vllm:num_preemptions",),
    "plait_prompt_tokens": ("vllm:prompt_tokens",),
    "plait_generated_tokens": ("vllm:generation_tokens",),
    "plait_requests_finished": ("vllm:request_success",),
    "plait_prefix_hit_tokens": ("vllm:prefix_cache_hits",),
    "plait_prefix_query_tokens": ("vllm:prefix_cache_queries",),
    "plait_time_to_first_token_seconds": ("vllm:time_to_first_token_seconds",),
    "plait_inter_token_seconds": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "plait_e2e_seconds": ("vllm:e2e_request_latency_seconds",),
    "plait_queue_seconds": ("vllm:request_queue_time_seconds",),
    "plait_prefill_seconds": ("vllm:request_prefill_time_seconds",),
    "plait_decode_seconds": ("vllm:request_decode_time_seconds",),
    "plait_request_prompt_tokens": ("vllm:request_prompt_tokens",),
    "plait_request_output_tokens": ("vllm:request_generation_tokens",),
}
"""vLLM's names by ours; counters without `_total`. The second ones are of older versions, which gateways still read."""
_LABELS = {"replica": "engine", "reason": "finished_reason"}


def vllm_metrics(page: str, model: str, page_size: int, num_pages: Sequence[int]) -> str:
    """OpenMetrics text that repeats what `page` has under vLLM's names. `num_pages`: of each replica's pool."""
    families = _families(page)
    lines: list[str] = []
    for ours, names in NAMES.items():
        for name in names:
            lines += _renamed(name, families[ours], model)
    return "\n".join([*lines, *_cache_config(model, page_size, num_pages)]) + "\n"


def escaped(label: str) -> str:
    """A label's value as OpenMetrics writes it."""
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _families(page: str) -> dict[str, _Family]:
    """Each metric of the page that has a name of vLLM's."""
    families: dict[str, _Family] = {}
    for block in page.split("# HELP ")[1:]:
        first, kind, *lines = block.splitlines()
        name, _, meaning = first.partition(" ")
        if name in NAMES:
            families[name] = _Family(kind.rpartition(" ")[2], meaning, [_sample(line) for line in lines])
    return families


def _sample(line: str) -> re.Match[str]:
    found = _SAMPLE.fullmatch(line)
    assert found is not None, f"{line!r} is no sample"
    return found


def _renamed(name: str, family: _Family, model: str) -> Iterator[str]:
    yield f"# HELP {name} {family.help}"
    yield f"# TYPE {name} {family.kind}"
    for sample in family.samples:
        labels = {_LABELS.get(key, key): value for key, value in re.findall(r'(\w+)="([^"]*)"', sample["labels"] or "")}
        named = {"engine": "0", "model_name": escaped(model)} | labels
        shown = ",".join(f'{key}="{value}"' for key, value in named.items())
        yield f"{name}{sample['suffix'] or ''}{{{shown}}} {sample['value']}"


def _cache_config(model: str, page_size: int, num_pages: Sequence[int]) -> Iterator[str]:
    """From which gateways and autoscalers work out how many tokens a server holds."""
    yield "# HELP vllm:cache_config_info Tokens of a KV page and pages of the pool, as labels; always 1."
    yield "# TYPE vllm:cache_config_info gauge"
    for engine, num in enumerate(num_pages):
        labels = f'engine="{engine}",model_name="{escaped(model)}",block_size="{page_size}",num_gpu_blocks="{num}"'
        yield f"vllm:cache_config_info{{{labels}}} 1"
