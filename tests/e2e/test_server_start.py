"""Why a server does not start: the exit code, and a last line that says what to do."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
from plait_testing.running_server import StartServer


def test_a_missing_model_ends_with_4(server: StartServer) -> None:
    refused = server(Path("/no/such/model"))
    assert refused.wait() == 4
    assert "'/no/such/model'" in refused.last_line
    assert "hub id like OWNER/NAME" in refused.last_line


def test_a_truncated_gguf_ends_with_4(server: StartServer, demo_gguf: Path, tmp_path: Path) -> None:
    whole = demo_gguf.read_bytes()
    for num_bytes in (0, 3, 100, 1_000_000, len(whole) // 2):
        broken = tmp_path / f"broken-{num_bytes}.gguf"
        broken.write_bytes(whole[:num_bytes])
        refused = server(broken)
        assert refused.wait() == 4, refused.errors
        assert "exit code 4" in refused.last_line


def test_an_unknown_architecture_is_named_with_those_that_are_served(
    server: StartServer, check_models: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(check_models / "recall-gqa", model, copy_function=shutil.copyfile)
    config = model / "config.json"
    config.write_text(config.read_text().replace("Qwen3MoeForCausalLM", "FrobnicateForCausalLM"))
    refused = server(model)
    assert refused.wait() == 4
    assert "FrobnicateForCausalLM" in refused.last_line
    assert "LlamaForCausalLM" in refused.last_line or "llama" in refused.last_line


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_broken_file_is_named(server: StartServer, check_models: Path, tmp_path: Path, name: str) -> None:
    model = tmp_path / "model"
    shutil.copytree(check_models / "recall-gqa", model, copy_function=shutil.copyfile)
    (model / name).write_bytes(b"{ rubbish")
    refused = server(model)
    assert refused.wait() == 4, refused.errors
    assert name in refused.last_line


def test_a_tokenizer_that_makes_its_library_panic_ends_with_4(
    server: StartServer, check_models: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(check_models / "recall-gqa", model, copy_function=shutil.copyfile)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    prefix = {"continuing_subword_prefix": "####", "merges": [["a", "b"]]}
    tokenizer["model"] = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, **prefix}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused = server(model)
    assert refused.wait() == 4, refused.errors
    assert "download it again" in refused.last_line
    assert "panicked at" not in refused.errors


def test_a_port_in_use_ends_with_2_before_the_model_is_read(server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = server(Path("/no/such/model"), "--port", str(port))
        assert refused.wait() == 2
    assert f"port {port} on 127.0.0.1 is in use" in refused.last_line


def test_a_public_bind_without_a_key_ends_with_2(server: StartServer) -> None:
    refused = server(Path("/no/such/model"), "--host", "0.0.0.0")
    assert refused.wait() == 2
    assert "--api-key-file" in refused.last_line


def test_a_context_longer_than_the_models_ends_with_2(server: StartServer, check_models: Path) -> None:
    refused = server(check_models / "recall-gqa", "--max-model-len", "1000000")
    assert refused.wait() == 2
    assert "--max-model-len is 1000000; this model's context holds 1 to 8192 tokens: lower it" in refused.last_line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--num-pages", "8", "--watermark", "8"), "--watermark is 8; it must leave a page of the pool's 8 "),
        (("--watermark", "900000000"), "--watermark is 900000000; it must leave a page of the pool's "),
        (("--max-num-seqs=1", "--long-prefill", "512"), "--long-prefill-token-threshold (--long-prefill) is 512; "),
        (("--served-model-name=",), "--served-model-name is ''; "),
    ],
    ids=lambda value: str(value)[:32],
)
def test_a_setting_that_cannot_work_is_named_with_what_to_do(
    server: StartServer, check_models: Path, flags: tuple[str, ...], said: str
) -> None:
    refused = server(check_models / "recall-gqa", *flags)
    assert refused.wait() == 2, refused.errors
    assert said in refused.last_line
    assert "1048576" not in refused.last_line, "the pool is the one that was asked for, or the ranks' own"


def test_a_config_out_of_range_says_what_to_do(server: StartServer, check_models: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(check_models / "recall-gqa", model, copy_function=shutil.copyfile)
    config = model / "config.json"
    fields = json.loads(config.read_text()) | {"num_hidden_layers": 0}
    config.write_text(json.dumps(fields))
    refused = server(model)
    assert refused.wait() == 4
    assert "num_hidden_layers is 0, but must be" in refused.last_line
    assert "download the file again" in refused.last_line


def test_a_pool_that_holds_no_request_ends_with_2(server: StartServer, check_models: Path) -> None:
    refused = server(check_models / "recall-gqa", "--num-pages", "1", "--page-size", "1")
    assert refused.wait() == 2, refused.errors
    assert "num-pages is 1" in refused.last_line
