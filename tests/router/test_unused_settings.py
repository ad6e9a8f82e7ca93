"""A setting that nothing reads on this device, or with this model, is named at the start with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from plait.http.engine import Description, Status
from plait.launch.startup_summary import print_startup_summary
from plait.page_size import with_page_size
from plait.settings import AttentionSettings, DeviceSettings, SchedulerSettings, ServeSettings

CPU, GPU = "cpu, 2 threads, cpu attention", "NVIDIA H200, triton attention"
LLAMA, LATENT = "llama", "deepseek_v3"
NO_GRAPHS = DeviceSettings(cuda_graphs=False, cuda_graph_max_bs=8)
WITHOUT_PEERS = DeviceSettings(custom_all_reduce=False)
CHUNKS = AttentionSettings(mla_context_chunk_size=64)


@pytest.mark.parametrize(
    ("settings", "architecture", "device", "said"),
    [
        (ServeSettings(), LLAMA, CPU, None),
        (ServeSettings(attention=CHUNKS), LATENT, CPU, None),
        (ServeSettings(device=DeviceSettings(cuda_graph_max_bs=8)), LLAMA, GPU, None),
        (ServeSettings(device=DeviceSettings(cuda_graphs=False)), LLAMA, GPU, None),
        (ServeSettings(device=WITHOUT_PEERS), LLAMA, GPU, None),
        (ServeSettings(device=WITHOUT_PEERS), LLAMA, CPU, "--no-custom-all-reduce (CPUs reduce by gloo)"),
        (ServeSettings(device=NO_GRAPHS), LLAMA, GPU, "--cuda-graph-max-bs (--no-cuda-graphs captures no steps)"),
        (ServeSettings(scheduler=SchedulerSettings(policy="fair", priority_aging_seconds=5)), LLAMA, CPU, None),
        (
            ServeSettings(scheduler=SchedulerSettings(priority_aging_seconds=5)),
            LLAMA,
            CPU,
            "--priority-aging-seconds (--policy fcfs reads no priorities)",
        ),
        (
            ServeSettings(device=NO_GRAPHS, attention=CHUNKS),
            LLAMA,
            CPU,
            "--no-cuda-graphs and --cuda-graph-max-bs (a CPU captures no steps); "
            "--mla-context-chunk-size (the model has no MLA)",
        ),
    ],
)
def test_the_first_lines_name_what_has_no_effect(
    settings: ServeSettings, architecture: str, device: str, said: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    description = Description(model_id="m", architecture=architecture, max_model_len=512)
    status = Status(phase="ready", reason="", exit_code=0, step=0, stuck=False, late=False, hung=False, device=device)
    print_startup_summary(description, status, with_page_size(settings, Path("/m")), "http://localhost:1")
    lines = [line for line in capsys.readouterr().out.splitlines() if "unused" in line]
    assert lines == ([] if said is None else [f"  unused   {said}"])
