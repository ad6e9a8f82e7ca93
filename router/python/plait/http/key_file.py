"""The API key file, which is read again when it changes: keys come and go while streams run.

A request is admitted or not when it begins; what was admitted goes on when its key is taken out.
"""

from __future__ import annotations

from pathlib import Path

from plait.http.auth import API_KEY_FLAG, ApiKeys
from plait.http.key_terms import KeyTerms
from plait.http.live_files import LiveFiles
from plait.settings import Policy

_EOF = b"# EOF\n"


class KeyFile(LiveFiles[ApiKeys]):
    """The keys of a file. A new state of it that cannot be used is refused, and the keys before it stay."""

    def __init__(self, path: Path, policy: Policy, flag: str = API_KEY_FLAG) -> None:
        """Read it; raises `SettingsError` if it cannot be used."""
        self._flag = flag
        self._path = path
        self._policy = policy
        super().__init__("API keys" if flag == API_KEY_FLAG else "admin keys", [path])

    def read(self) -> ApiKeys:
        return ApiKeys.from_file(self._path, self._policy, self._flag)

    def shown(self) -> str:
        return f"{len(self.value)} from {self._path}"

    def shown_kept(self) -> str:
        return f"the {len(self.value)} that were"

    def admit(self, key: bytes) -> KeyTerms | None:
        """What `key` is granted now; None if it is not one of ours."""
        return self.value.admit(key)

    def metrics(self) -> bytes:
        """OpenMetrics text, without its end."""
        return (
            "# HELP plait_api_keys API keys that are accepted.\n"
            "# TYPE plait_api_keys gauge\n"
            f"plait_api_keys {len(self.value)}\n"
            "# HELP plait_api_key_file_refused 1 while the API key file cannot be used and the keys before it count.\n"
            "# TYPE plait_api_key_file_refused gauge\n"
            f"plait_api_key_file_refused {int(self.problem is not None)}\n"
            "# HELP plait_api_key_file_changes Changed states of the API key file, by what became of them.\n"
            "# TYPE plait_api_key_file_changes counter\n"
            f'plait_api_key_file_changes_total{{result="loaded"}} {self.num_loaded}\n'
            f'plait_api_key_file_changes_total{{result="refused"}} {self.num_refused}\n'
        ).encode()


def with_key_metrics(engine_text: bytes, keys: KeyFile) -> bytes:
    """The engine's `/metrics` with those of the key file."""
    return engine_text.removesuffix(_EOF) + keys.metrics() + _EOF
