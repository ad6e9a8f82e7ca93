"""A systemd of its own in namespaces: units of deploy/systemd run as it runs them. It needs root.

Of the machine's units it knows the targets that every service hangs on, and nothing else. Python, its packages and the
repository are mounted where the unit's user reads them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import psutil

from plait_testing import budgets
from plait_testing.control_plane import wait_for
from plait_testing.installed_plait import MOUNT, inside, variables

SYSTEMD = Path("/lib/systemd/systemd")
UNITS = budgets.ROOT / "deploy" / "systemd"
_NAMESPACES = ["--mount", "--pid", "--fork", "--kill-child", "--ipc", "--uts", "--cgroup"]
_TARGETS = "sysinit.target basic.target shutdown.target sockets.target umount.target"
_BEGIN = f"""
set -e
mount --make-rprivate /
# Credentials are mounted by a child of the manager: shared, as it makes its mounts where it is no container's.
mount --make-rshared /
mount -t proc proc /proc
mkdir "$folder/layers"
mount -t tmpfs tmpfs "$folder/layers" && mkdir "$folder/layers/upper" "$folder/layers/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$folder/layers/upper,workdir=$folder/layers/work" overlay /etc
for path in /run /etc/plait /etc/systemd /var/cache /var/lib /sys/fs/cgroup; do
    mkdir -p "$path" && mount -t tmpfs -o mode=755 tmpfs "$path"
done
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mkdir -p /run/lock /run/systemd /etc/systemd/system/plait.service.d
{MOUNT}cp "$folder/plait.env" /etc/plait/
install -m 0600 "$folder/keys.txt" /etc/plait/keys.txt
mkdir "$folder/targets"
for name in {_TARGETS}; do cp "/lib/systemd/system/$name" "$folder/targets/"; done
mount --bind "$folder/targets" /lib/systemd/system
cp "$units/plait.service" /etc/systemd/system/
sed "s/^ListenStream=.*/ListenStream=127.0.0.1:$port/" "$units/plait.socket" > /etc/systemd/system/plait.socket
cp "$folder/log.conf" /etc/systemd/system/plait.service.d/
printf '[Unit]\\nDescription=What the test starts\\n' > /etc/systemd/system/test.target
exec env -i PATH="$PATH" container=test {SYSTEMD} --system --unit=test.target --log-target=console --show-status=no
"""


def reason_without_systemd() -> str:
    """Why this machine runs no manager for a test; empty if it does."""
    missing = [name for name in ("unshare", "nsenter", "systemctl") if shutil.which(name) is None]
    if missing or not SYSTEMD.exists():
        return f"no {', '.join(missing) or SYSTEMD}"
    done = subprocess.run(["unshare", *_NAMESPACES, "true"], capture_output=True, text=True, check=False)
    return f"no namespaces: {done.stderr.strip()}" if done.returncode else ""


class SystemdManager:
    """`plait.service` and `plait.socket` are loaded, and not started."""

    def __init__(self, folder: Path, model: Path, flags: str, key: str, port: int) -> None:
        self._folder, self._port = folder, port
        self.log = folder / "log"
        (folder / "plait.env").write_text(f"MODEL={inside(model)}\nFLAGS={flags}\n")
        (folder / "keys.txt").write_text(f"{key}\n")
        (folder / "log.conf").write_text(
            f"[Service]\nStandardOutput=append:{self.log}\nStandardError=append:{self.log}\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SystemdManager:
        given = variables(self._folder) | {"folder": str(self._folder), "units": str(UNITS), "port": str(self._port)}
        with (self._folder / "systemd.log").open("wb") as said:
            process = self._process = subprocess.Popen(
                ["unshare", *_NAMESPACES, "sh", "-c", _BEGIN], env=os.environ | given, stdout=said, stderr=said
            )
        wait_for(lambda: process.poll() is not None or self._is_up(), "systemd", self.said)
        assert process.poll() is None, self.said()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        manager = self._manager()
        if manager is not None:
            os.kill(manager, signal.SIGKILL)  # and with it all of its namespace
        self._process.wait()

    def _is_up(self) -> bool:
        return self.try_systemctl("is-active", "test.target").stdout == "active\n"

    def said(self) -> str:
        """The manager's and the server's last lines."""
        paths = (self._folder / "systemd.log", self.log)
        return "\n".join(path.read_text()[-3000:] for path in paths if path.exists())

    def _manager(self) -> int | None:
        assert self._process is not None
        children = psutil.Process(self._process.pid).children() if self._process.poll() is None else []
        return children[0].pid if children else None

    def try_systemctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        manager = self._manager()
        command = ["nsenter", f"--target={manager}", "--mount", "--pid", "systemctl", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def systemctl(self, *words: str) -> str:
        done = self.try_systemctl(*words)
        assert done.returncode == 0, f"systemctl {' '.join(words)}: {done.stderr} {self.said()}"
        return done.stdout

    def property(self, name: str) -> str:
        """Of plait.service."""
        return self.systemctl("show", "plait.service", f"--property={name}", "--value").strip()

    def kill(self) -> None:
        """The server's main process, by SIGKILL."""
        self.systemctl("kill", "--kill-whom=main", "--signal=SIGKILL", "plait.service")

    def set_flags(self, flags: str) -> None:
        """In /etc/plait/plait.env."""
        manager = self._manager()
        program = f'sed -i "s/^FLAGS=.*/FLAGS={flags}/" /etc/plait/plait.env'
        subprocess.run(["nsenter", f"--target={manager}", "--mount", "sh", "-c", program], check=True)
