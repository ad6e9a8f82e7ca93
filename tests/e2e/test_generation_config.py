"""`--generation-config none` and FOLDER on running servers; the model's own file asks for greedy decoding."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from plait_testing.running_server import Server, StartServer


def texts(server: Server, **fields: object) -> set[str]:
    """Those of a few seeds."""
    answers = [
        httpx.post(
            server.url + "/v1/completions",
            json={"prompt": "x", "max_tokens": 16, "ignore_eos": True, "seed": seed} | fields,
            timeout=60,
        ).json()
        for seed in range(6)
    ]
    return {answer["choices"][0]["text"] for answer in answers}


def test_none_takes_openais_defaults_in_place_of_the_models(check_models: Path, server: StartServer) -> None:
    running = server(check_models / "recall-gqa", "--threads", "1", "--generation-config", "none")
    assert len(texts(running)) > 1
    assert len(texts(running, temperature=0)) == 1, "a request's own field goes first"


def test_a_folders_file_stands_in_for_the_models(check_models: Path, server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"do_sample": True, "temperature": 1.5, "top_k": 1}))
    running = server(check_models / "recall-gqa", "--threads", "1", "--generation-config", str(tmp_path))
    assert len(texts(running)) == 1
    assert len(texts(running, top_k=-1)) > 1, "the file's temperature, not the model's greedy decoding"
