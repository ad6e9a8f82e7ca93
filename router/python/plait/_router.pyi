"""The engine: scheduler, link and text, on Rust threads that never enter the interpreter; and the simulator."""

from collections.abc import Callable
from typing import final

__all__ = ["Engine", "ModelFilesError", "Simulation"]

class ModelFilesError(ValueError):
    """The model's files are missing, broken or of a kind that is not supported (exit code 4)."""

@final
class Engine:
    """One replica. Everything is non-blocking; what happens is told through `event_fd` and `take`."""

    def __new__(cls, settings: bytes) -> Engine:
        """Read the model's text side (tokenizer, template, end tokens), bind the link, start the threads.

        `settings` is the JSON of `plait.settings.EngineSettings`. Raises `ModelFilesError`,
        `ValueError` for settings that cannot work, `OSError` where threads or descriptors are lacking.
        """

    @property
    def endpoint(self) -> str:
        """Where workers dial, for example `ipc:///tmp/plait-x/link`."""

    @property
    def event_fd(self) -> int:
        """Readable when `take` has something; owned by the engine."""

    def set_config_fingerprint(self, fingerprint: bytes) -> None:
        """The 16 bytes that a worker's Hello must carry. Called before workers start; the first call counts."""

    def submit(self, stream: int, request: bytes) -> None:
        """Queue a request; `request` is the JSON of `plait.http.api.GenerateRequest`.

        Never raises for what the request holds: refusals come as the stream's error record.
        """

    def abort(self, stream: int) -> None:
        """The client is gone: nothing ends the stream's records. Unknown or ended streams are fine."""

    def take(self) -> bytes:
        """Everything that streams have to write, as little-endian records, and resets `event_fd`.

        Over 64 MiB untaken, generation waits. A slow client's backlog is the caller's to bound.

        A record is u64 stream, u8 flags, u32 length, payload. Flags: 1 last of its stream,
        2 error: the payload is then u16 HTTP status, u16 Retry-After in seconds (0: none), and a
        JSON body. Otherwise the payload is ready SSE bytes, or one whole JSON body.
        """

    def describe(self) -> bytes:
        """JSON: `{model_id, architecture, max_model_len, vocab_size, eos_token_ids, generation_defaults}`."""

    def status(self) -> bytes:
        """JSON: `{phase, reason, exit_code, step, idle, stuck, late, hung, ranks, num_pages, ...}`.

        Also `page_bytes`, `weight_bytes`, `device` and `dtype`. `phase` is `loading`, `ready`, `draining`,
        `stopped` or `failed`; `event_fd` becomes readable when it changes. `stuck` tells whether a step is
        overdue and `hung` whether the driver thread is (not healthy), `late` whether a rank's beat is (not
        ready). `ranks` counts those that have warmed up; `num_pages` is the least over the ranks, the bytes
        are their sum. With `failed`, `reason` is a sentence and `exit_code` the code that fits it.
        """

    def metrics(self) -> bytes:
        """OpenMetrics text (`application/openmetrics-text; version=1.0.0; charset=utf-8`)."""

    def worker_lost(self, rank: int, reason: str) -> None:
        """The launcher saw rank's process end: all streams end with an error, the phase is `failed`."""

    def drain(self) -> None:
        """Take no new request, finish those under way, then tell the workers to leave; ends in `stopped`."""

    def close(self) -> None:
        """Stop the threads now. Streams still open end with an error. Idempotent."""

@final
class Simulation:
    """The scheduler on a trace, in virtual time."""

    def __new__(cls, settings: bytes) -> Simulation:
        """Read the trace, the hardware and the model.

        `settings` is the JSON of `plait.simulate.settings.SimulatorSettings`. Raises `ValueError` for what
        cannot be simulated (with file and line where it stands in a file), `OSError` for files that cannot
        be read.
        """

    @property
    def num_requests(self) -> int:
        """Requests in the trace."""

    def run(self, on_progress: Callable[[int], object]) -> bytes:
        """Simulate to the last token; the JSON of `plait.simulate.report.Report`.

        Calls `on_progress` with the number of requests that have arrived, ten times a second. What it raises ends
        the simulation and is raised here, and so is Ctrl-C.
        """
