"""An engine's place in its group, from the command line."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

from plait.errors import SettingsError
from plait.secret_file import check_public_keys_file
from plait.settings import CoordinatorKeys, GroupMembership, GroupSettings, MemberKeys, ServeSettings

KEY_CHARACTERS = 40
"""Of a CURVE key in Z85."""
MAX_BYTES = 1 << 17


def is_in_group(settings: ServeSettings) -> bool:
    """Whether the engine's replicas step together, or with another engine's."""
    return settings.group.group_engines > 1 or settings.process.dp_attention


def group_place(settings: ServeSettings) -> GroupMembership | None:
    """The place that the settings describe; None for replicas that step freely.

    Raises `SettingsError` for flags that do not fit together, and for keys that cannot be read.
    """
    group = settings.group
    if group.group_engines == 1:
        _check_unused(group)
        return GroupMembership(engine=0, num_engines=1, endpoint="") if settings.process.dp_attention else None
    if group.group_engine >= group.group_engines:
        raise SettingsError(
            f"--group-engine is {group.group_engine}; a group of {group.group_engines} has engines "
            f"0 to {group.group_engines - 1} (--group-engines)"
        )
    if group.group_endpoint is None:
        raise SettingsError("--group-engines needs --group-endpoint: give the address at which engine 0 listens")
    if group.group_engine == 0:
        _check_unused_path(group.group_endpoint)
    return GroupMembership(
        engine=group.group_engine,
        num_engines=group.group_engines,
        endpoint=group.group_endpoint,
        keys=_read_keys(group),
    )


def _check_unused_path(endpoint: str) -> None:
    """ZeroMQ would take the path away from an engine 0 that listens there."""
    with socket.socket(socket.AF_UNIX) as dialler:
        try:
            dialler.connect(endpoint.removeprefix("ipc://"))
        except OSError:  # nobody listens there, or it is no path, which the engine sees
            return
    raise SettingsError(
        f"--group-endpoint {endpoint} is taken: engine 0 of a group listens there; end that group, or give another path"
    )


def _check_unused(group: GroupSettings) -> None:
    given = {
        "--group-engine": group.group_engine != 0,
        "--group-endpoint": group.group_endpoint is not None,
        "--group-secret-key-file": group.group_secret_key_file is not None,
        "--group-public-keys-file": group.group_public_keys_file is not None,
    }
    if unused := next((flag for flag, is_given in given.items() if is_given), None):
        raise SettingsError(f"{unused} needs --group-engines: say of how many engines the group is")


def _read_keys(group: GroupSettings) -> CoordinatorKeys | MemberKeys | None:
    secret_file, public_file = group.group_secret_key_file, group.group_public_keys_file
    if secret_file is None and public_file is None:
        return None
    if secret_file is None or public_file is None:
        raise SettingsError("--group-secret-key-file and --group-public-keys-file belong together: give both")
    (secret,) = read_key_lines("--group-secret-key-file", Path(secret_file), 1, is_secret=True)
    public = read_key_lines("--group-public-keys-file", Path(public_file), group.group_engines)
    if group.group_engine == 0:
        return CoordinatorKeys(secret=secret, allowed=tuple(public[1:]))
    return MemberKeys(server=public[0], public=public[group.group_engine], secret=secret)


def read_key_lines(flag: str, path: Path, num_keys: int, *, is_secret: bool = False) -> list[str]:
    """The keys of a file, one a line."""
    try:
        found = path.stat()
        text = path.read_text() if found.st_size <= MAX_BYTES else ""
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"{flag} {path} cannot be read: {error}") from error
    if is_secret and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"{flag} {path} is open to other users; run `chmod 600 {path}`")
    if not is_secret:
        check_public_keys_file(flag, path)
    keys = text.split()
    if len(keys) != num_keys or any(len(key) != KEY_CHARACTERS for key in keys):
        raise SettingsError(
            f"{flag} {path} holds {len(keys)} words; it needs {num_keys} of {KEY_CHARACTERS} characters, one a line: "
            "a CURVE key in Z85 for each engine or host"
        )
    return keys
