"""--kv-hash-key-file: replicas that share it hash pages and name clients alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from plait.errors import SettingsError
from plait.http.identity import ClientIdentity
from plait.launch.hash_key import cache_secrets

SECRET = "0123456789abcdef" * 4


def key_file(folder: Path, content: str, mode: int = 0o600) -> str:
    path = folder / "key"
    path.write_text(content)
    path.chmod(mode)
    return str(path)


def test_equal_files_give_equal_secrets_and_no_file_gives_random_ones(tmp_path: Path) -> None:
    shared = cache_secrets(key_file(tmp_path, SECRET))
    assert shared == cache_secrets(key_file(tmp_path, f"{SECRET}\n"))
    assert shared != cache_secrets(key_file(tmp_path, SECRET[::-1]))
    assert cache_secrets(None) != cache_secrets(None)


def test_the_key_of_hashes_and_that_of_salts_are_unrelated(tmp_path: Path) -> None:
    secrets = cache_secrets(key_file(tmp_path, SECRET))
    assert (len(secrets.hash_key), len(secrets.salt_key)) == (32, 32)
    assert secrets.hash_key not in secrets.salt_key.hex()


def test_a_client_has_one_salt_on_all_replicas_that_share_the_key(tmp_path: Path) -> None:
    salt_key = cache_secrets(key_file(tmp_path, SECRET)).salt_key
    one, other = (ClientIdentity(b"api key", salt_key=salt_key) for _ in range(2))
    assert one.salt("x") == other.salt("x")
    assert one.salt("x") != ClientIdentity(b"api key", salt_key=bytes(32)).salt("x")


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (SECRET, 0o644, "readable by other users; run `chmod 600"),
        (SECRET, 0o640, "readable by other users"),
        ("too short", 0o600, "holds 9 characters; it needs 32 to 4096"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_what_to_do(
    tmp_path: Path, content: str, mode: int, words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        cache_secrets(key_file(tmp_path, content, mode))
