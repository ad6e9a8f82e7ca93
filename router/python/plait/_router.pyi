"""The engine (scheduler, link and text, on Rust threads that never enter the interpreter), and the simulator."""

from collections.abc import Callable
from typing import final

__all__ = ["Engine", "ModelFilesError", "Simulation", "model_size"]

class ModelFilesError(ValueError):
    """The model's files are missing, broken or not supported (exit code 4)."""

@final
class Engine:
    """Replicas behind one front door. No method blocks; events arrive through `event_fd` and `take`."""

    def __new__(cls, settings: bytes) -> Engine:
        """Read the model's text side (tokenizer, template, end tokens), bind the links, start the threads.

        `settings` is the JSON of `plait.settings.EngineSettings`. Raises `ModelFilesError`,
        `ValueError` for invalid settings, `OSError` if threads or descriptors run out.
        """

    @property
    def endpoints(self) -> list[str]:
        """Addresses for the workers of each replica, for example `ipc:///tmp/plait-x/link`."""

    @property
    def remote_endpoints(self) -> list[str | None]:
        """Addresses for those on other hosts, such as `tcp://10.0.0.1:7452`; None for a replica without any."""

    @property
    def event_fd(self) -> int:
        """Readable when `take` has records; owned by the engine."""

    def set_config_fingerprint(self, fingerprint: bytes) -> None:
        """Set the 16 bytes that a worker's Hello must carry. Call it once, before workers start."""

    def submit(self, stream: int, tenant: int, request: bytes) -> None:
        """Queue a request; `request` is the JSON of `plait.http.api.GenerateRequest`.

        Requests are tokenised in turns among tenants. A full queue rejects one of the tenant with most.
        Never raises for an invalid request: the stream gets an error record.
        """

    def submit_text(self, stream: int, tenant: int, call: bytes) -> None:
        """Queue a call of `plait.http.text_calls`, in turns with the requests; the text threads answer it."""

    def abort(self, stream: int) -> None:
        """Drop a stream whose client is gone; it gets no last record. Unknown and ended streams are ignored."""

    def announce(self, stream: int, max_unsent_bytes: int) -> None:
        """Announce an event stream whose socket may be handed over. Call it before `submit`.

        `take` then has its first record and its last one; those between wait for `hand_over` or `release`. A client
        that leaves more than `max_unsent_bytes` unread is cut off.
        """

    def hand_over(self, stream: int, socket: int, write_seconds: float) -> None:
        """Write what lies between the first record and the last one to a connected socket, in HTTP's chunks.

        The descriptor is duplicated. Nothing else may write to it until `take` has the last record. Bytes that stay
        unread for `write_seconds` shut the connection down. Raises `OSError` without a free descriptor, `ValueError`
        for seconds that are none.
        """

    def release(self, stream: int) -> None:
        """Forget an announced stream and its socket. Unknown and ended streams are ignored."""

    def comment(self, comment: bytes) -> None:
        """Write bytes to all streams that were handed over and wait for their next record."""

    def take(self) -> bytes:
        """Take all output of the streams as little-endian records, and reset `event_fd`.

        Generation pauses while over 64 MiB wait here. The caller bounds the backlog of a slow client.

        A record is u64 stream, u8 flags, u32 length, payload. Flags: 1 last of its stream, 2 error, 4 the client reads
        too slowly, 8 it is gone (both without payload, of streams that were handed over), 16 tokens used: of a stream
        that has ended after its request began to be served, in whatever way: u64 of its prompts, u64 of its output, and
        u8 why the last choice ended (0 stop, 1 length, 2 abort, 3 error), then its times: each a u8 (0 first row, 1
        first token, 2 preempted, 3 end) and u64 microseconds since `submit`. The payload of an error is
        u16 HTTP status, u16 Retry-After in seconds (0: none), and a JSON body. Any other payload is SSE bytes, or one
        whole JSON body.
        """

    def describe(self) -> bytes:
        """JSON: `{model_id, architecture, max_model_len, vocab_size, eos_token_ids, generation_defaults}`."""

    def status(self) -> bytes:
        """JSON: `{phase, reason, exit_code, step, idle, stuck, late, hung, down, losses, ranks, num_pages, ...}`.

        Also `page_bytes`, `weight_bytes`, `device` and `dtype`. `phase` is `loading`, `ready`, `draining`,
        `stopped` or `failed`; `event_fd` becomes readable when it changes. `stuck`: a step is overdue. `hung`:
        the driver thread is. Both mean not healthy. `late`: a rank's heartbeat is overdue, which means not
        ready. `ranks` counts ranks that have warmed up. `num_pages` is the least over the ranks; the bytes are
        their sum. `slot_state` has `slot_bytes`, `snapshot_bytes` and `num_snapshots` if the model keeps state for
        each slot. With `failed`, `reason` is a sentence and `exit_code` its code.

        `down`: the ranks were lost and requests wait for others, for `reason`; not healthy. `losses` counts how often.

        `replicas` lists the same for each replica. The engine is `ready` while one of them is, after all were once;
        it is `failed` when all are, or when one failed before it was ready. Its device is that of replica 0.
        """

    def metrics(self) -> bytes:
        """OpenMetrics text (`application/openmetrics-text; version=1.0.0; charset=utf-8`)."""

    def worker_lost(self, rank: int, reason: str) -> None:
        """Report that a rank's process ended. Its replica becomes `failed`, and its streams end with an error.

        What the rank itself said of its end tells more, and has a moment to arrive.
        """

    def worker_killed(self, rank: int, reason: str) -> None:
        """Report that a rank's process was killed or is stopped: as `worker_lost`, but at once."""

    def restart_ranks(self, replica: int, fingerprint: bytes) -> str:
        """Await new ranks of a replica that is `down`, whose processes have all ended. Returns the address they dial.

        Their Hellos carry the 16 bytes of `fingerprint`. Raises `OSError` if there is no socket for them.
        """

    def give_up(self, replica: int, why: str) -> None:
        """Let a replica that is `down` become `failed`: no ranks will start."""

    def end_stream(self, stream: int) -> None:
        """End a stream for an operator: its client reads an error. Unknown and ended streams are ignored."""

    def flush_cache(self) -> None:
        """Let no prompt that comes from now on find what was computed before."""

    def pause(self, is_paused: bool) -> None:
        """Plan no step, or plan steps again. Requests are taken meanwhile, and wait."""

    def list_requests(self) -> bytes | None:
        """JSON: `requests`, of `{stream, replica, running, prompt_tokens, output_tokens, seconds}` for each choice.

        And `silent_replicas`: those that have not answered within 2 s; None if none has. Call it on its own thread.
        """

    def set_log_level(self, level: str) -> None:
        """Change the level of the engine's lines; raises `ValueError` for another word than four."""

    def drain(self) -> None:
        """Reject new requests, finish those in flight, then stop the workers. Ends in `stopped`."""

    def close(self) -> None:
        """Stop the threads now. Open streams end with an error. Idempotent."""

@final
class Simulation:
    """The scheduler on a trace, in virtual time."""

    def __new__(cls, settings: bytes) -> Simulation:
        """Read the trace, the hardware and the model.

        `settings` is the JSON of `plait.simulate.settings.SimulatorSettings`. Raises `ValueError` for invalid
        settings, with file and line for a mistake in a file, and `OSError` for unreadable files.
        """

    @property
    def num_requests(self) -> int:
        """Requests in the trace."""

    def run(self, on_progress: Callable[[int], object]) -> bytes:
        """Simulate to the last token; the JSON of `plait.simulate.report.Report`.

        Calls `on_progress` with the number of requests that have arrived, ten times a second. An exception from it,
        or Ctrl-C, ends the simulation and is raised here.
        """

def model_size(config: str) -> bytes:
    """JSON of `plait.batch_sizes.ModelSize` for a model's `config.json`.

    Raises `ValueError` for a shape that is not known, `OSError` for a file that cannot be read.
    """
