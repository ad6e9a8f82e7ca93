"""The compose file's service, run as it says: its command, user, files, rights, health check and end; no Docker.

The image is a layer over this machine's files, with Plait in /opt; the GPU that it asks for is left out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from plait_testing import budgets
from plait_testing.control_plane import wait_for
from plait_testing.installed_plait import MOUNT, variables
from plait_testing.mini_kubelet import enter_network
from plait_testing.node_network import NodeNetwork, reason_without_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.acceptance("image")]
DEPLOY = budgets.ROOT / "deploy"
KEY = "sk-test-of-compose-0123456789abcdef"
ON_A_CPU = ["--device=cpu", "--threads=1", "--num-pages=64"]
CONTAINER = f"""
set -e
mount --make-rprivate /
mkdir "$folder/layers"
mount -t tmpfs tmpfs "$folder/layers" && cd "$folder/layers" && mkdir upper work root
mount -t overlay -o lowerdir=/,upperdir=upper,workdir=work overlay root
at=$folder/layers/root
for path in dev proc sys; do mount --rbind "/$path" "$at/$path"; done
{MOUNT}
mkdir -p "$at$model" "$at/run/secrets" "$at/cache"
mount --bind -o ro "$check_model" "$at$model"
cp "$keys" "$at/run/secrets/keys" && chmod 0640 "$at/run/secrets/keys" && chown "0:$gid" "$at/run/secrets/keys"
mount -t tmpfs -o "uid=$uid,gid=$gid,mode=750" tmpfs "$at/cache"
mount -t tmpfs -o "size=$shm" tmpfs "$at/dev/shm"
mount -t tmpfs -o "$tmp" tmpfs "$at/tmp"
mount -o remount,ro "$at"
exec env -i $image_env chroot "$at" setpriv --reuid "$uid" --regid "$gid" --clear-groups --no-new-privs \\
    --bounding-set=-all --inh-caps=-all "$@"
"""


def service() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["plait"]
    return found


def server_stage() -> str:
    """Of the Dockerfile."""
    return (DEPLOY / "Dockerfile").read_text().partition("FROM python AS server\n")[2].replace("\\\n", "")


def image_environment() -> str:
    (line,) = re.findall(r"^ENV (.*)$", server_stage(), re.MULTILINE)
    return f"PATH=/opt/plait/bin:{os.environ['PATH']} {line}"


def health_check() -> list[str]:
    (words,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", server_stage(), re.MULTILINE)
    found: list[str] = json.loads(words)
    return found


@pytest.fixture
def network() -> Iterator[NodeNetwork]:
    if missing := reason_without_namespaces() or ("" if shutil.which("setpriv") else "no setpriv"):
        pytest.skip(missing)
    with NodeNetwork(2) as made:
        yield made


def start(network: NodeNetwork, folder: Path, check_model: Path, log: Path) -> subprocess.Popen[bytes]:
    """The service in the namespaces of a container, with all that the file gives it."""
    given = service()
    assert given["read_only"] is True
    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges:true"]
    assert given["secrets"] == ["keys"]
    assert {(volume["target"], volume.get("read_only", False)) for volume in given["volumes"]} == {
        ("/models", True),
        ("/cache", False),
    }
    keys = folder / "keys.txt"
    keys.write_text(KEY)
    uid, gid = given["user"].split(":")
    ((tmp_path, tmp),) = (one.split(":") for one in given["tmpfs"])
    assert tmp_path == "/tmp"
    more = {"model": given["command"][1], "check_model": str(check_model), "keys": str(keys), "uid": uid, "gid": gid}
    more |= {
        "folder": str(folder),
        "tmp": tmp,
        "shm": given["shm_size"].removesuffix("b"),
        "image_env": image_environment(),
    }
    words = ["plait", *given["command"], *ON_A_CPU]
    command = ["ip", "netns", "exec", network.namespace(1), "unshare", "--mount", "--ipc", "--uts"]
    with log.open("wb") as said:
        return subprocess.Popen(
            [*command, "sh", "-c", CONTAINER, "sh", *words],
            env=os.environ | variables(folder) | more,
            stdout=said,
            stderr=said,
        )


def test_the_service_runs_as_the_file_says(network: NodeNetwork, tmp_path: Path, check_models: Path) -> None:
    log = tmp_path / "log"
    container = start(network, tmp_path, check_models / "recall-gqa", log)
    check = ["ip", "netns", "exec", network.namespace(1), *health_check()]
    (published,) = service()["ports"]
    url = f"http://{network.address(1)}:{published.rpartition(':')[2]}"
    try:
        wait_for(
            lambda: container.poll() is not None or subprocess.run(check, capture_output=True).returncode == 0,
            "its health",
            log.read_text,
        )
        assert container.poll() is None, log.read_text()
        status = Path(f"/proc/{container.pid}/status").read_text()
        assert re.search(r"^Uid:\t10001\t10001", status, re.MULTILINE)
        assert re.search(r"^CapEff:\t0+$", status, re.MULTILINE)
        assert re.search(r"^NoNewPrivs:\t1$", status, re.MULTILINE)
        mounts = Path(f"/proc/{container.pid}/mounts").read_text()
        assert re.search(r"^overlay / overlay ro,", mounts, re.MULTILINE)
        body = {"prompt": "0123 4567", "max_tokens": 4, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {KEY}"}
        with ThreadPoolExecutor(1, initializer=enter_network, initargs=(network, 0)) as clients:

            def ask(**more: Any) -> httpx.Response:
                path = f"{url}/v1/completions"
                return clients.submit(httpx.post, path, json=body, timeout=120, trust_env=False, **more).result()

            wait_for(lambda: ask(headers=headers).status_code == httpx.codes.OK, "an answer", log.read_text)
            assert ask().status_code == httpx.codes.UNAUTHORIZED
        container.terminate()
        assert container.wait(120) == 0, log.read_text()
    finally:
        container.kill()
        container.wait()
