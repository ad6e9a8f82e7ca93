"""Clients that people have, unchanged, each in an environment of its own, against a server of Plait's.

    python -m venv A; A/bin/pip install llm
    python tests/bench/http/clients.py --client llm=A/bin/python --out tests/bench/results/clients.json

A client is a program of `clients/`: `with_NAME.py`. Rows of clients that were not named stay in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from plait.bench.result_file import commit, machine

sys.path.insert(0, str(Path(__file__).parents[2]))

from plait_testing.running_server import start_server

TESTS = Path(__file__).parents[2]
PROGRAMS = TESTS / "bench" / "http" / "clients"
MODEL = TESTS / "models" / "recall-gqa"
SERVER = ("--dtype=float32", "--max-seqs=8", "--max-model-len=2048", "--tool-call-parser=hermes", "--threads=1")
CLIENT_SECONDS = 1800.0


def asked(name: str, python: str, url: str) -> dict[str, Any]:
    """What a client's program prints."""
    command = [python, str(PROGRAMS / f"with_{name}.py"), url, str(MODEL)]
    path = os.environ | {"PYTHONPATH": str(TESTS)}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=CLIENT_SECONDS, env=path)
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def rows(name: str, told: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for check, wrong in told["checks"].items():
        print(f"{name}, {check}: {wrong or 'right'}", flush=True)
        yield {"case": f"{name}, {check}", "metric": "right", "unit": "1", "value": int(wrong is None), "goal": 1}


def told_by_all(clients: dict[str, str]) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        server = start_server(Path(folder, "server.log"), MODEL, *SERVER)
        try:
            if not server.url:
                raise SystemExit(server.errors)
            return {name: asked(name, python, server.url) for name, python in clients.items()}
        finally:
            server.kill()


def joined(told: Iterable[dict[str, str]]) -> dict[str, str]:
    """The versions of each package; a package may be in several environments."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for versions in told:
        for package, version in versions.items():
            found[package].add(version)
    return {package: " and ".join(sorted(versions)) for package, versions in found.items()}


def merged(file: Path, told: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The record with the rows of these clients in place of their old ones."""
    old: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"rows": [], "versions": {}}
    others = [row for row in old["rows"] if row["metric"] != "right" or row["case"].partition(",")[0] not in told]
    made = [row for name, one in told.items() for row in rows(name, one)]
    return old | {
        "commit": commit(),
        "command": "tests/bench/http/clients.py; rows of other metrics by hand",
        "machine": machine(),
        "versions": old["versions"] | joined(one["versions"] for one in told.values()),
        "rows": others + made,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--client", action="append", required=True, metavar="NAME=PYTHON")
    parser.add_argument("--out", type=Path, default=Path("clients.json"))
    args = parser.parse_args()
    clients = dict(client.split("=", 1) for client in args.client)
    document = merged(args.out, told_by_all(clients))
    args.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(any(row["value"] != 1 for row in document["rows"] if row["metric"] == "right"))


if __name__ == "__main__":
    main()
