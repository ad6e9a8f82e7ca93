"""The page of `/metrics`: the engine's metrics, the front door's, and on request the same under vLLM's names."""

from __future__ import annotations

import msgspec

from plait.http.engine import EngineHandle, Status, read_status
from plait.http.front_metrics import FrontMetrics
from plait.http.key_file import KeyFile, with_key_metrics
from plait.http.vllm_metrics import escaped, vllm_metrics

_EOF = b"# EOF\n"


class MetricsPage(msgspec.Struct, frozen=True, kw_only=True):
    """What the page is made of."""

    engine: EngineHandle
    keys: KeyFile | None
    model: str
    """The model id that requests ask for."""
    page_size: int
    """Tokens of a KV page."""
    front: FrontMetrics
    has_vllm_names: bool = False

    def text(self) -> bytes:
        """OpenMetrics text, as clients read it."""
        return self._text(with_keys=False)

    def admin_text(self) -> bytes:
        """The same for operators: with what each key took."""
        return self._text(with_keys=True)

    def _text(self, *, with_keys: bool) -> bytes:
        text = self.engine.metrics()
        if self.keys is not None:
            text = with_key_metrics(text, self.keys)
        own = text.removesuffix(_EOF) + self.front.text(with_keys=with_keys) + self._server_info()
        return own + (self._vllm(own) if self.has_vllm_names else b"") + _EOF

    def _server_info(self) -> bytes:
        return (
            "# HELP plait_server_info The served model and the tokens of a KV page; always 1.\n"
            "# TYPE plait_server_info gauge\n"
            f'plait_server_info{{model="{escaped(self.model)}",page_size="{self.page_size}"}} 1\n'
        ).encode()

    def _vllm(self, own: bytes) -> bytes:
        num_pages = pages_of_replicas(read_status(self.engine))
        return vllm_metrics(own.decode(), self.model, self.page_size, num_pages).encode()


def pages_of_replicas(status: Status) -> list[int]:
    """The size of each replica's pool."""
    return [replica.num_pages for replica in status.replicas] or [status.num_pages]
