"""vLLM's names for the metrics of an engine without requests."""

from __future__ import annotations

from plait.http.vllm_metrics import NAMES, vllm_metrics


def page_of(*samples: str) -> str:
    """A page with one gauge for each metric that vLLM names, and these samples of running requests."""
    families = {name: f"# HELP {name} Meaning.\n# TYPE {name} gauge\n{name} 0\n" for name in NAMES}
    running = "plait_requests_running"
    families[running] = "\n".join([f"# HELP {running} Requests.", f"# TYPE {running} gauge", *samples, ""])
    return "".join(families.values())


def test_the_only_replica_is_engine_0() -> None:
    page = vllm_metrics(page_of("plait_requests_running 3"), "tiny", 64, [9])
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 3\n' in page
    assert "# HELP vllm:num_requests_running Requests.\n# TYPE vllm:num_requests_running gauge\n" in page
    assert 'vllm:cache_config_info{engine="0",model_name="tiny",block_size="64",num_gpu_blocks="9"} 1\n' in page


def test_a_replica_is_an_engine() -> None:
    page = vllm_metrics(page_of('plait_requests_running{replica="1"} 3'), "tiny", 64, [9, 9])
    assert 'vllm:num_requests_running{engine="1",model_name="tiny"} 3\n' in page
    assert 'vllm:cache_config_info{engine="1",' in page


def test_a_models_name_cannot_end_its_label() -> None:
    page = vllm_metrics(page_of("plait_requests_running 3"), 'a"b\\c\nd', 64, [9])
    assert r'model_name="a\"b\\c\nd"} 3' in page
