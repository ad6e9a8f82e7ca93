"""Too little memory ends a rank with its cause, before the memory is filled."""

from __future__ import annotations

import json
import mmap
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from plait_proto import ExitCode, Fail, encode_config
from plait_testing.engine_side import EngineSide, engine_side
from plait_testing.tiny_models import config_for
from plait_worker.errors import WorkerError, is_out_of_memory
from plait_worker.models.loader import dummy_model
from plait_worker.parallel import Parallel

CPU = torch.device("cpu")
TOO_MUCH = 1 << 50
ROOM = 512 << 20
"""Address space that is left to a worker: less than one matrix, more than its threads and measuring take."""
RUN_IN_LITTLE_ROOM = f"""
import resource, sys
from plait_worker.process import main

[taken] = [int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmSize")]
resource.setrlimit(resource.RLIMIT_AS, (taken + {ROOM}, taken + {ROOM}))
sys.exit(main())
"""


def write_config(folder: Path, **changes: object) -> None:
    sizes = {"vocab_size": 1_000_000, "hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    config = {"architectures": ["LlamaForCausalLM"], **sizes, **heads, **changes}
    (folder / "config.json").write_text(json.dumps(config))


def test_every_way_to_say_that_there_is_no_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(TOO_MUCH)
    with pytest.raises(OSError, match="Cannot allocate memory") as of_the_system:
        mmap.mmap(-1, TOO_MUCH)
    with pytest.raises(MemoryError) as of_python:
        bytearray(TOO_MUCH)
    assert all(is_out_of_memory(raised.value) for raised in (of_torch, of_the_system, of_python))


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), FileNotFoundError(2, "x"), ValueError("x")])
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.mark.process
def test_weights_that_the_system_has_no_memory_for_are_no_bug(tmp_path: Path) -> None:
    write_config(tmp_path)
    with engine_side() as engine:
        fail, code, errors = run_in_little_room(engine, tmp_path)
    assert (fail.code, code) == (ExitCode.HARDWARE, ExitCode.HARDWARE)
    assert "the weights do not fit into memory" in fail.reason
    assert "you tried to allocate 1024000000 bytes" in fail.reason
    assert "Traceback" not in errors


def run_in_little_room(engine: EngineSide, model: Path) -> tuple[Fail, int, str]:
    config = engine.folder / "config.json"
    config.write_bytes(encode_config(config_for(model, engine.folder, load_format="dummy")))
    words = ["--connect", engine.endpoint, "--rank", "0", "--config", str(config)]
    command = [sys.executable, "-c", RUN_IN_LITTLE_ROOM, *words]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=180, check=False)
    return engine.expect(Fail), ended.returncode, ended.stderr


def test_a_model_too_large_is_rejected_before_its_first_random_weight(tmp_path: Path) -> None:
    write_config(tmp_path, vocab_size=1000, hidden_size=1024, intermediate_size=1 << 14, num_hidden_layers=8)
    most_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    whole = 8 * (3 * 1024 * 1024 + 3 * (1024 << 14) + 2 * 1024) + 2 * 1000 * 1024 + 1024
    largest = 1024 << 14  # a matrix is there twice until it is in panels
    in_words = rf"weights take {(whole + largest) * 4 / 2**30:.2f} GiB or more and 1\.00 GiB of memory are free"
    with pytest.raises(WorkerError, match=in_words) as refused:
        dummy_model(tmp_path, "float32", CPU, Parallel(), free_bytes=1 << 30)
    assert refused.value.code == ExitCode.HARDWARE
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most_before) << 10 < 1 << 29


@pytest.mark.process
def test_random_weights_of_absurd_size_are_rejected(tmp_path: Path) -> None:
    wide = {"hidden_size": 1 << 20, "num_experts": 1 << 20, "moe_intermediate_size": 1 << 20, "num_experts_per_tok": 2}
    write_config(tmp_path, architectures=["Qwen3MoeForCausalLM"], vocab_size=100, **wide)
    with pytest.raises(WorkerError, match=r"weights take .* or more and 16\.00 GiB of memory are free"):
        dummy_model(tmp_path, "float32", CPU, Parallel(), free_bytes=16 << 30)


def test_random_weights_take_no_more_than_is_free(tmp_path: Path) -> None:
    write_config(tmp_path, vocab_size=100)
    largest = 256 * 256 * 4
    needed = dummy_model(tmp_path, "float32", CPU, Parallel()).weight_bytes + largest
    dummy_model(tmp_path, "float32", CPU, Parallel(), free_bytes=needed)
    with pytest.raises(WorkerError, match="too little"):
        dummy_model(tmp_path, "float32", CPU, Parallel(), free_bytes=needed - 1)
