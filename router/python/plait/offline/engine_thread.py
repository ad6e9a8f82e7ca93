"""An engine and its workers on a thread of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, MutableMapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import uvloop
from plait_proto import ExitCode

from plait._router import Engine
from plait.errors import StartError
from plait.http.engine import Description, read_description, read_status
from plait.http.streams import Streams
from plait.launch.engine_start import open_engine, with_sizes, write_config
from plait.launch.group_place import group_place
from plait.launch.hash_key import cache_secrets
from plait.launch.model_layout import check_model_layout
from plait.launch.rank_interface import set_rank_interface
from plait.launch.run_dir import run_directory
from plait.launch.supervision import Supervision
from plait.launch.worker import TERM_SECONDS
from plait.model_files import find_model
from plait.offline.calls import Calls
from plait.process_environment import prepare_environment
from plait.settings import ServeSettings

T = TypeVar("T")


class EngineThread:
    """Runs an engine until `close`. Its workers end with it, and with this process."""

    def __init__(
        self,
        model: str | None,
        settings: ServeSettings,
        environment: MutableMapping[str, str],
        names: tuple[str, ...] = (),
    ) -> None:
        """Returns when the engine is ready; raises `StartError`.

        `environment` becomes the workers'. `names` are taken as a request's `model`; none: the model's own.
        """
        prepare_environment(environment)
        self._model, self._settings, self._environment, self._names = model, settings, environment, names
        self._started: Future[Calls] = Future()
        self._loop = uvloop.new_event_loop()
        self._engine: Engine | None = None
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="plait-engine", daemon=True)
        self._thread.start()
        try:
            self.calls = self._started.result()
        except BaseException:  # Ctrl-C too
            self.close()
            raise

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the engine's event loop. Raises `RuntimeError` once the engine has ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise RuntimeError("the engine has ended; make a new LLM") from None

    def close(self) -> None:
        """End the engine and its workers. What waits for an answer gets an error. Idempotent."""
        self._is_closing = True
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self._thread:  # as when it collects the last reference
            self._thread.join()

    def _stop(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner, contextlib.ExitStack() as stack:
                runner.run(self._live(stack))
        except Exception as error:  # noqa: BLE001 - it belongs to who waits for the start
            if not self._started.done():
                self._started.set_exception(error)

    async def _live(self, stack: contextlib.ExitStack) -> None:
        group = group_place(self._settings)
        set_rank_interface(self._environment, group, shares_experts=self._settings.process.dp_attention)
        local = find_model(self._model)
        check_model_layout(str(local.path), self._settings.process)
        run_dir = stack.enter_context(run_directory())
        settings, _ = with_sizes(self._settings, local, self._environment)
        secrets = cache_secrets(settings.process.kv_hash_key_file)
        engine = stack.enter_context(open_engine(local, settings, run_dir, secrets.hash_key, group))
        description = read_description(engine)
        config = write_config(engine, local, settings, description, run_dir, group)
        await self._serve(engine, description, settings, config, local.path)

    async def _serve(
        self, engine: Engine, description: Description, settings: ServeSettings, config: Path, model: Path
    ) -> None:
        loop = asyncio.get_running_loop()
        streams = Streams(engine)
        streams.attach(loop)
        self._engine = engine
        supervision = Supervision(engine, streams, settings, config, None, model, self._environment)
        grace_seconds = 0.0  # a loading worker does not read the engine's messages
        try:
            if self._is_closing:
                engine.close()
            status = await supervision.wait_for_phase("ready", "stopped", "failed")
            if status.phase == "ready":
                grace_seconds = TERM_SECONDS
                names = self._names or (description.model_id,)
                self._started.set_result(Calls(engine, streams, names, settings))
                status = await supervision.live()
        finally:
            last = read_status(engine)
            engine.close()
            streams.dispatch()
            await supervision.end(last, grace_seconds)
            streams.detach(loop)
        if not self._started.done():
            raise (
                supervision.failure(status)
                if last.phase == "failed"
                else StartError("the engine was closed", ExitCode.BUG)
            )
