"""The admin listener: its keys, its socket and its server."""

from __future__ import annotations

import socket
from pathlib import Path

from plait.admin_settings import AdminSettings
from plait.errors import SettingsError
from plait.http.admin import Admin, build_admin
from plait.http.key_file import KeyFile
from plait.http.server import http_server
from plait.launch.listen import listen


def admin_keys(settings: AdminSettings) -> KeyFile | None:
    """Its keys; raises `SettingsError` if the file cannot be used."""
    if settings.admin_key_file is None:
        return None
    if settings.admin_port is None:
        raise SettingsError("--admin-key-file needs --admin-port; give a port, or leave the file out")
    return KeyFile(Path(settings.admin_key_file), "fcfs", "--admin-key-file")


def open_admin(settings: AdminSettings, *, has_keys: bool) -> socket.socket | None:
    """Its socket, if there is to be one; raises `SettingsError`."""
    if settings.admin_port is None:
        return None
    return listen(settings.admin_host, settings.admin_port, has_keys=has_keys, flags="--admin-")


class AdminServer:
    """Serves operators until it is ended."""

    def __init__(self, admin: Admin, listener: socket.socket, keys: KeyFile | None) -> None:
        self._http = http_server(build_admin(admin))
        self._listener = listener
        self._keys = keys

    async def serve(self) -> None:
        await self._http.serve(sockets=[self._listener])

    async def watch_keys(self) -> None:
        """Read the keys again when they change."""
        if self._keys is not None:
            await self._keys.watch()

    def end(self) -> None:
        self._http.should_exit = True
