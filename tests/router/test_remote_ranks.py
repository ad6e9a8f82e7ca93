"""Ranks on other hosts, as `plait serve` reads them from its flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from plait.errors import SettingsError
from plait.launch.remote_ranks import remote_workers
from plait.nodes.key_files import PUBLIC_KEYS, secret_key_file, write_new_keys
from plait.settings import GroupSettings, HostSettings, ProcessSettings, ServeSettings


def hosts(folder: Path, **change: object) -> HostSettings:
    write_new_keys(folder, 2)
    given = {
        "rank_hosts": 2,
        "rank_endpoint": "tcp://10.0.0.1:7451",
        "rank_secret_key_file": str(secret_key_file(folder, 0)),
        "rank_public_keys_file": str(folder / PUBLIC_KEYS),
    }
    return HostSettings(**(given | change))  # type: ignore[arg-type]


def test_each_other_hosts_key_speaks_for_its_share_of_the_ranks(tmp_path: Path) -> None:
    settings = ServeSettings(process=ProcessSettings(tp=2, dp=2), hosts=hosts(tmp_path))
    remote = remote_workers(settings)
    assert remote is not None
    assert remote.endpoints == ("tcp://10.0.0.1:7451", "tcp://10.0.0.1:7452")
    assert [one.ranks for one in remote.allowed] == [(2, 3)]
    assert remote.allowed[0].public == (tmp_path / PUBLIC_KEYS).read_text().split()[1]
    assert remote_workers(ServeSettings()) is None


@pytest.mark.parametrize(
    ("change", "process", "said"),
    [
        ({}, ProcessSettings(tp=3), "each host takes equally many of the 3 ranks"),
        ({}, ProcessSettings(tp=2, dp_attention=True), "without --group-engines and --dp-attention"),
        ({"rank_endpoint": None}, ProcessSettings(tp=2), "give all three"),
        ({"rank_endpoint": "ipc:///tmp/x"}, ProcessSettings(tp=2), "give tcp://HOST:PORT"),
        ({"rank_endpoint": "tcp://h:65535"}, ProcessSettings(tp=2, dp=2), "up to 65535"),
        ({"rank_hosts": 1}, ProcessSettings(tp=2), "--rank-endpoint needs --rank-hosts"),
        ({"rank_hosts": 4}, ProcessSettings(tp=4), "it needs 4 of 40 characters"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    change: dict[str, object], process: ProcessSettings, said: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingsError) as error:
        remote_workers(ServeSettings(process=process, hosts=hosts(tmp_path, **change)))
    assert said in error.value.message


def test_an_engine_of_a_group_has_its_ranks_here(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="without --group-engines"):
        remote_workers(ServeSettings(group=GroupSettings(group_engines=2), hosts=hosts(tmp_path)))


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    given = hosts(tmp_path)
    secret_key_file(tmp_path, 0).chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        remote_workers(ServeSettings(process=ProcessSettings(tp=2), hosts=given))
