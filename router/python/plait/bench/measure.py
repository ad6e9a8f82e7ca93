"""One benchmark: its servers, its prompts, and one run after another."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
from tqdm import tqdm

from plait.bench.client_lag import ClientLag, client_lag
from plait.bench.client_pool import ClientPool
from plait.bench.datasets import read_text_lines
from plait.bench.load import Case, Load, body_prompt, build_load
from plait.bench.metrics import Metrics, compute_metrics
from plait.bench.prompts import Lines, Part, PromptMaker, TextSize, TokenIds, Words, read_token_range
from plait.bench.run import Run, send
from plait.bench.server import Server
from plait.bench.settings import BenchSettings
from plait.bench.slo import Slo, read_slo
from plait.errors import SettingsError
from plait.http.auth import read_keys

STREAMS_PER_PROCESS = 16
"""Fewer streams are not worth another process."""
MAX_PROCESSES = 8
WARM_UP_TOKENS = 16
TOKEN_RANGE = "1000-30000"
"""Within the vocabularies of today's models, without their special tokens."""


class Stream(msgspec.Struct, frozen=True):
    """A request and its output, as token ids."""

    index: int
    prompt: msgspec.Raw
    """The prompt as sent: token ids, a text or messages."""
    answer: list[int]


class Measured(msgspec.Struct, frozen=True):
    """A run and its metrics."""

    run: Run
    metrics: Metrics
    client_lag: ClientLag
    streams: list[Stream] = []
    """The outputs of --keep-streams that ended well."""


class Bench:
    """What all runs of a command share: probed servers, a prompt maker, limits."""

    def __init__(self, settings: BenchSettings, urls: list[str]) -> None:
        self.settings = settings
        self.slo: Slo | None = read_slo(settings.measure.slo) if settings.measure.slo is not None else None
        key_file = settings.server.api_key_file
        key = next(iter(read_keys(Path(key_file)))) if key_file is not None else None
        self._salt = settings.load.salt if settings.load.salt is not None else secrets.token_hex(8)
        rough = _maker(settings, TextSize())
        timeout = settings.measure.timeout
        self.servers = [Server(url, place, settings.server, key, timeout) for place, url in enumerate(urls)]
        for server in self.servers:
            server.learn_counting(rough.make((Part(f"{self._salt}/first/{server.position}", 16),)))
        _count_alike(self.servers)
        _check_kept(settings, self.servers)
        self.text_size = _text_size(settings, self.servers[0], self._salt)
        self._maker = _maker(settings, self.text_size) if self.text_size is not None else rough

    @property
    def seeds(self) -> list[int]:
        """One for each repetition."""
        num = self.settings.measure.repeats or (3 if len(self.servers) > 1 else 1)
        return [self.settings.load.seed + index for index in range(num)]

    def measure(self, case: Case, server: Server, seed: int) -> Measured:
        """Run a case on a server. A run that Ctrl-C interrupted is marked partial."""
        duration, measuring = self.settings.load.duration, self.settings.measure
        load = build_load(case, seed, self._salt, duration)
        if not load.requests:
            raise SettingsError(f"{case.name}: no request is left; raise --max-len or --duration")
        self._warm_up(load, server, seed)
        bodies = (server.body(body_prompt(request, self._maker), request.output_len) for request in load.requests)
        kept = _evenly_spread_indices(len(load.requests), self.settings.output.keep_streams)
        with ClientPool(self._num_processes(case)) as clients, _progress(case, server, len(load.requests)) as bar:
            clients.load(server.setup(), bodies, kept)
            run = send(clients, load, server, seed, duration, _watch(bar))
        streams = [
            Stream(one.index, msgspec.Raw(body_prompt(load.requests[one.index], self._maker)), one.token_ids)
            for one in run.outcomes
            if one.token_ids is not None and one.failure is None
        ]
        return Measured(run, compute_metrics(run, self.slo), client_lag(run, measuring.max_lag_ms / 1000), streams)

    def _warm_up(self, load: Load, server: Server, seed: int) -> None:
        """Send prompts with the load's lengths and other contents, one after another."""
        for number in range(self.settings.measure.warmup):
            request = load.requests[number % len(load.requests)]
            own = Part(f"{self._salt}/warm-up/{seed}/{server.position}/{number}", request.input_len or 1)
            server.warm_up(self._maker.make((own,)), min(request.output_len, WARM_UP_TOKENS))

    def _num_processes(self, case: Case) -> int:
        if self.settings.measure.processes is not None:
            return self.settings.measure.processes
        num_streams = case.pace.cap or case.num_prompts
        return max(1, min(MAX_PROCESSES, (os.cpu_count() or 2) // 2, num_streams // STREAMS_PER_PROCESS))


def _progress(case: Case, server: Server, total: int) -> tqdm:
    """A progress bar on a terminal, nothing elsewhere."""
    return tqdm(total=total, desc=f"{case.name} {server.url}", unit="request", leave=False, disable=None)


def _watch(bar: tqdm) -> Callable[[int, int], None]:
    def show(num_ended: int, num_in_flight: int) -> None:
        bar.set_postfix_str(f"{num_in_flight} in flight", refresh=False)
        bar.update(num_ended - bar.n)

    return show


def _maker(settings: BenchSettings, size: TextSize) -> PromptMaker:
    chat = settings.server.api == "chat"
    if settings.load.text is not None:
        return Lines(chat, size, read_text_lines(Path(settings.load.text)))
    if chat:
        return Words(chat, size)
    return TokenIds(*read_token_range(settings.load.token_range or TOKEN_RANGE))


def _text_size(settings: BenchSettings, server: Server, salt: str) -> TextSize | None:
    """Tokens per piece of text, measured from the server's usage; None for token ids, which are exact."""
    if settings.server.api == "completions" and settings.load.text is None:
        return None
    maker, few, many = _maker(settings, TextSize()), 100, 400
    usages = [server.num_prompt_tokens(maker.make((Part(f"{salt}/size", num),))) for num in (few, many)]
    if usages[0] is None or usages[1] is None or usages[1] <= usages[0]:
        return TextSize()
    slope = (usages[1] - usages[0]) / (many - few)
    return TextSize(slope, max(0.0, usages[0] - few * slope), is_measured=True)


def _evenly_spread_indices(num: int, num_chosen: int) -> frozenset[int]:
    """`num_chosen` indices below `num`, evenly spread; all if there are fewer."""
    return frozenset(place * num // num_chosen for place in range(num_chosen)) if num_chosen else frozenset()


def _check_kept(settings: BenchSettings, servers: list[Server]) -> None:
    """Raise `SettingsError` if --keep-streams is given and a server sends no token ids."""
    for server in servers if settings.output.keep_streams else ():
        if server.counting != "token-ids":
            raise SettingsError(
                f"--keep-streams needs token ids, and {server.url} is counted by {server.counting}; give --count-by "
                "token-ids, or leave --keep-streams out"
            )


def _count_alike(servers: list[Server]) -> None:
    """Count all compared servers alike, by what every one of them sends."""
    kinds = {server.counting for server in servers}
    if len(kinds) > 1:
        for server in servers:
            server.counting = "chunks" if "chunks" in kinds else "usage"
