"""The images, if they were built here: nothing secret in them, and they run as nobody on a read-only root.

`make test-image` builds both; buildah unpacks them without a daemon.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from plait_testing.recording import Record

pytestmark = [pytest.mark.slow, pytest.mark.acceptance("image")]
SERVER, ROUTER = "localhost/plait", "localhost/plait-router"
USER = 10001
HISTORIES = {".bash_history", ".python_history", ".sh_history", ".lesshst", ".viminfo", ".wget-hsts"}
CREDENTIALS = {".netrc", ".pypirc", ".npmrc", ".git-credentials", "id_rsa", "id_ed25519", "credentials", "pip.conf"}
SECRET_NAME = re.compile(r"token|secret|password|api_?key|credential", re.IGNORECASE)
READY_SECONDS = 120.0


def buildah(*words: str) -> str:
    return subprocess.run(["buildah", *words], check=True, capture_output=True, text=True).stdout.strip()


@functools.cache
def has(image: str) -> bool:
    command = ["buildah", "inspect", "--type", "image", image]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module", params=[SERVER, ROUTER])
def image(request: pytest.FixtureRequest) -> str:
    """Its name; both are in the store of buildah."""
    if shutil.which("buildah") is None:
        pytest.skip("no buildah")
    name: str = request.param
    if not has(name):
        pytest.skip(f"no image {name}; `make test-image` builds it")
    return name


@pytest.fixture(scope="module")
def root(image: str) -> Iterator[Path]:
    """The image's files."""
    container = buildah("from", "--pull-never", image)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("umount", container)
        buildah("rm", container)


@pytest.fixture(scope="module")
def described(image: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(buildah("inspect", "--type", "image", image))["OCIv1"]
    return found


def test_it_runs_as_nobody_and_says_nothing_secret(described: dict[str, Any]) -> None:
    config = described["config"]
    assert config["User"] == f"{USER}:{USER}"
    assert config["Entrypoint"] == ["plait"]
    assert not [word for word in config["Env"] if SECRET_NAME.search(word)]
    steps = [str(step.get("created_by", "")) for step in described["history"]]
    assert not [step for step in steps if re.search(r"(token|secret|password)=", step, re.IGNORECASE)]


def test_its_size_is_recorded(image: str, root: Path, record: Record) -> None:
    size = sum(path.lstat().st_size for path in files(root))
    record(f"image {image.rpartition('/')[2]}", "size_of_its_files", "bytes", size)
    largest = 600e6 if image == ROUTER else 12e9
    assert size < largest


def files(root: Path) -> Iterator[Path]:
    for folder, _, names in os.walk(root):
        yield from (Path(folder, name) for name in names)


def test_no_history_no_credentials_and_no_private_key_lie_in_it(root: Path) -> None:
    left = [path for path in files(root) if path.name in HISTORIES | CREDENTIALS]
    assert left == []
    homes = [root / "root", root / "home", root / "cache"]
    assert not [path for home in homes for path in files(home) if path.name not in (".bashrc", ".profile")]
    small = [path for path in files(root) if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 16]
    keys = [path for path in small if re.match(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----", path.read_bytes())]
    assert keys == []


def test_its_user_owns_the_cache_alone(root: Path) -> None:
    own = [path for path in files(root) if path.lstat().st_uid == USER or path.lstat().st_gid == USER]
    assert own == []
    assert (root / "cache").stat().st_uid == USER
    assert not [path for path in files(root / "opt") if path.lstat().st_mode & 0o002 and not path.is_symlink()]


def test_its_inventory_names_the_packages_that_are_there(root: Path) -> None:
    inventory = json.loads((root / "usr/share/plait/sbom.json").read_bytes())
    assert inventory["bomFormat"] == "CycloneDX"
    named = {f"{one['name']}-{one['version']}".lower().replace("_", "-") for one in inventory["components"]}
    installed = {
        path.stem.lower().replace("_", "-") for path in root.glob("opt/plait/lib/python3*/site-packages/*.dist-info")
    }
    assert {name for name in installed if name.startswith("plait-")} <= named
    assert installed <= named
    crates = list(root.glob("opt/plait/lib/python3*/site-packages/plait-*.dist-info/sboms/*.json"))
    assert any(json.loads(path.read_bytes())["components"] for path in crates)


RUN = """
set -e
mount --make-rprivate /
mount --bind "$1" "$1"
mount -o remount,bind,ro "$1"
mount --rbind /dev "$1/dev"
mount -t proc proc "$1/proc"
mount -t tmpfs -o mode=1777 tmpfs "$1/tmp"
mount -t tmpfs -o mode=1777 tmpfs "$1/cache"
mount --bind -o ro "$2" "$1/mnt"
user=$3
root=$1
shift 3
exec chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --bounding-set=-all "$@"
"""
"""As the chart runs it: nobody, without rights, on a read-only root with two folders to write; models are in /mnt."""


@contextlib.contextmanager
def started(root: Path, models: Path, environment: list[str], *words: str) -> Iterator[subprocess.Popen[str]]:
    command = ["unshare", "--mount", "--ipc", "--uts", "sh", "-c", RUN, "sh", str(root), str(models), str(USER)]
    process = subprocess.Popen(
        ["env", "-i", *environment, *command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def environment(described: dict[str, Any]) -> list[str]:
    found: list[str] = described["config"]["Env"]
    return found


def test_its_root_cannot_be_written(root: Path, environment: list[str], check_models: Path) -> None:
    program = (
        "import os\nprint(os.getuid())\nopen('/cache/x', 'w')\n"
        "for path in ('/x', '/opt/plait/x', '/usr/x'):\n"
        "    try: open(path, 'w')\n"
        "    except OSError as error: print(error.strerror)\n"
    )
    with started(root, check_models, environment, "python3", "-c", program) as container:
        said, errors = container.communicate(timeout=READY_SECONDS)
    assert said.splitlines() == [str(USER), *["Read-only file system"] * 3], errors


@pytest.mark.parametrize("image", [SERVER], indirect=True)
def test_it_serves_and_drains(root: Path, environment: list[str], check_models: Path, record: Record) -> None:
    begun = time.monotonic()
    words = ["plait", "serve", "/mnt/recall-gqa", "--port=0", "--device=cpu", "--threads=1", "--num-pages=64"]
    with started(root, check_models, environment, *words) as container:
        assert container.stdout is not None
        lines = iter(container.stdout.readline, "")
        url = next(line.split(": ", 1)[1].strip() for line in lines if line.startswith("Plait is ready: "))
        record(
            "image plait on a read-only root, recall-gqa on a CPU", "time_to_ready", "seconds", time.monotonic() - begun
        )
        body = {"prompt": "0123 4567", "max_tokens": 8, "ignore_eos": True}
        done = httpx.post(f"{url}/v1/completions", json=body, timeout=READY_SECONDS, trust_env=False)
        assert done.status_code == httpx.codes.OK, done.text
        container.terminate()
        assert container.wait(READY_SECONDS) == 0


@pytest.mark.parametrize("image", [ROUTER], indirect=True)
def test_the_image_without_torch_sizes_a_model(root: Path, environment: list[str], check_models: Path) -> None:
    assert not list(root.glob("opt/plait/lib/python3*/site-packages/torch*"))
    with started(root, check_models, environment, "plait", "plan", "/mnt/recall-gqa") as container:
        said, errors = container.communicate(timeout=READY_SECONDS)
    assert container.returncode == 0, errors
    assert "plait serve /mnt/recall-gqa" in said
