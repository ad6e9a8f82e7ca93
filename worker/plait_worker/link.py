"""The worker's end of the wire: one thread that owns the socket and never runs torch.

The loop talks to it through an in-process socket pair (what is to be sent) and a queue (what came in). The engine
never has more plans in flight than its credit, so the queue is short; an engine that breaks this is refused.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import Empty, Queue

import zmq
from plait_proto import (
    NO_RESULT,
    Drain,
    ExitCode,
    Fail,
    Heartbeat,
    Kind,
    Malformed,
    Plan,
    StepMasks,
    StoreOperation,
    StoreReply,
    StoreRequest,
    Welcome,
    decode,
    encode,
)
from plait_proto.codec import MAX_FRAME_BYTES

from plait_worker.errors import EngineError, WorkerError
from plait_worker.link_keys import HANDSHAKE_FAILED, LinkKeys, why_ended

_log = logging.getLogger(__name__)

FromEngine = Welcome | Plan | StepMasks | Drain
"""What the loop receives."""
NextLook = Callable[[], float | None]
"""Seconds until the loop looks at its work again without a message; None: only a message brings it back."""

_OUTBOX = "inproc://outbox"
_CLOSE = b""
_BYE = bytes([Kind.BYE])
_HEARTBEAT_SECONDS = 0.5
_FLUSH_MILLISECONDS = 2000
_HIGH_WATER_MARK = 64
# From the link's end to the process's. A loop that waits for a GPU whose peer is gone never comes back.
_COMEBACK_SECONDS = 1.0
# Two plans of credit, the masks of each in a few messages, and a Drain wait at most; a Welcome came before them.
_MAX_WAITING = 64
# If one of these is lost, the worker's state differs from the engine's; other messages may be lost.
_ESSENTIAL = {Kind.WELCOME, Kind.PLAN, Kind.STEP_MASKS, Kind.DRAIN, Kind.FAIL}


class Link:
    """One DEALER socket; made and closed by the thread that runs the loop. Any thread may send."""

    def __init__(self, endpoint: str, rank: int, keys: LinkKeys | None = None) -> None:
        """Dial ``endpoint`` (a ZeroMQ address) as ``rank-RANK``; returns before anything is connected.

        ``keys`` are for an engine on another host. Raises ``zmq.ZMQError`` if the address is invalid.
        """
        # Not a SimpleQueue: before CPython 3.13 its ``get`` can hang if the timeout ends between taking the queue's
        # lock and waiting for it. With a timeout of 50 us on a busy machine that happens.
        self._inbox: Queue[FromEngine | WorkerError] = Queue()
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PAIR)
        self._outbox.bind(_OUTBOX)
        self._sending = threading.Lock()
        self._rank = rank
        self._ids = itertools.count()
        self._wire = _Wire(self._context, endpoint, rank, self._inbox, keys)
        self._thread = threading.Thread(target=self._wire.run, name="link", daemon=True)
        self._thread.start()

    def send(self, frames: Sequence[bytes]) -> None:
        """Queue a message; the link's thread sends it at once."""
        with self._sending:
            self._outbox.send_multipart(frames)

    def ask(self, operation: StoreOperation, key: str, value: bytes, *, of_group: bool) -> Future[bytes | None]:
        """Ask the engine's store; the link's ``WorkerError`` ends the wait if the engine is gone."""
        answer: Future[bytes | None] = Future()
        request = StoreRequest(self._rank, next(self._ids), of_group, operation, key, value)
        self._wire.asked[request.id] = answer
        self.send(encode(request))
        return answer

    def welcome(self) -> Welcome | None:
        """The engine's answer to Hello, None if it is Drain; blocks.

        Raises ``WorkerError`` if it is another, or none will come.
        """
        answer = self._receive()
        if isinstance(answer, Drain):
            return None
        if not isinstance(answer, Welcome):
            raise WorkerError(ExitCode.BUG, f"the engine answered Hello with {type(answer).__name__}")
        return answer

    def messages(self, next_look: NextLook) -> Iterator[Plan | StepMasks]:
        """Plans and masks as they come in, until Drain.

        ``next_look`` is called before each wait, and again during one after the seconds that it gave.
        Raises ``WorkerError`` if the link ends or the protocol is broken.
        """
        while not isinstance(message := self._receive(next_look), Drain):
            if not isinstance(message, Plan | StepMasks):
                raise WorkerError(ExitCode.BUG, f"the engine sent {type(message).__name__} instead of a plan")
            yield message

    def has_message(self) -> bool:
        """Whether a message is here that was not taken."""
        return not self._inbox.empty()

    def finished(self, step: int) -> None:
        """Heartbeats report this step from now on."""
        self._wire.last_step = step

    def close(self) -> None:
        """Send the queued messages, for two seconds at most, and end the thread."""
        self._outbox.send(_CLOSE)
        self._thread.join()
        self._outbox.close(linger=0)
        self._context.term()

    def _receive(self, next_look: NextLook = lambda: None) -> FromEngine:
        received = self._next(next_look)
        if isinstance(received, WorkerError):
            raise received
        return received

    def _next(self, next_look: NextLook) -> FromEngine | WorkerError:
        while (seconds := next_look()) is not None:
            with contextlib.suppress(Empty):
                return self._inbox.get(timeout=seconds)
        return self._inbox.get()


class _Wire:
    """The sockets and the state of the link's thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        rank: int,
        inbox: Queue[FromEngine | WorkerError],
        keys: LinkKeys | None,
    ) -> None:
        self.last_step = 0
        self.asked: dict[int, Future[bytes | None]] = {}
        """What the store has not answered, by the request's id."""
        self._rank = rank
        self._inbox = inbox
        self._num_malformed = 0
        self._is_greeted = False
        self._has_left = False
        self._is_asked_for_stacks = keys is None
        """By its server, with a signal; an engine on another host cannot."""
        self._failure: WorkerError | None = None
        self._exit_at = math.inf
        self._parent = os.getppid()
        self._dealer = _dealer(context, rank)
        if keys is not None:
            keys.set_on(self._dealer)
        self._monitor = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED | HANDSHAKE_FAILED)
        self._dealer.connect(endpoint)
        self._outbox = context.socket(zmq.PAIR)
        self._outbox.connect(_OUTBOX)
        self._poller = zmq.Poller()
        for socket in (self._outbox, self._dealer, self._monitor):
            self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        next_heartbeat = time.monotonic()
        is_open = True
        while is_open:
            wait_until = min(next_heartbeat, self._exit_at)
            ready = dict(self._poller.poll(max(0, math.ceil((wait_until - time.monotonic()) * 1000))))
            if self._outbox in ready:
                is_open = self._forward()
            if self._dealer in ready:
                self._take_all()
            if self._monitor in ready:
                self._lose_engine(why_ended(self._monitor))
            if is_open and self._failure is not None and time.monotonic() >= self._exit_at:
                if NO_RESULT in self._failure.reason and not self._is_asked_for_stacks:
                    faulthandler.dump_traceback(all_threads=True)
                _end_process(self._failure)
            if time.monotonic() >= next_heartbeat:
                self._heartbeat()
                next_heartbeat = time.monotonic() + _HEARTBEAT_SECONDS
        self._close()

    def _forward(self) -> bool:
        """Send one message of the loop's; False when it was the last."""
        frames = self._outbox.recv_multipart()
        if frames == [_CLOSE]:
            return False
        try:
            self._dealer.send_multipart(frames)
        except zmq.Again:  # libzmq gives up a connection whose handshake failed
            self._lose_engine(why_ended(self._monitor))
        self._is_greeted = True
        if frames[0] == _BYE:
            self._leave()
        if self._failure is not None:
            self._fail_asked(self._failure)
        return True

    def _leave(self) -> None:
        """The engine may close the link now: this rank has said its last word."""
        self._has_left = True
        if self._failure is None:
            self._poller.unregister(self._dealer)
            self._poller.unregister(self._monitor)

    def _take_all(self) -> None:
        while self._failure is None and self._dealer.poll(0):
            self._handle_message(self._dealer.recv_multipart())

    def _handle_message(self, frames: list[bytes]) -> None:
        try:
            message = decode(frames)
        except Malformed as malformed:
            self._drop_malformed(frames, str(malformed))
            return
        if isinstance(message, Fail):
            self._end_link(EngineError(message.code, message.reason))
        elif isinstance(message, StoreReply):
            if (answer := self.asked.pop(message.id, None)) is not None:
                answer.set_result(message.value)
        elif not isinstance(message, FromEngine):
            self._drop_malformed(frames, f"{type(message).__name__} is not for workers")
        elif self._inbox.qsize() < _MAX_WAITING:
            self._inbox.put(message)
        else:
            self._end_link(
                WorkerError(ExitCode.BUG, f"the engine sent more than {_MAX_WAITING} messages ahead of its credit")
            )

    def _drop_malformed(self, frames: list[bytes], reason: str) -> None:
        """Count and drop a message that cannot be read; end the link if it was an essential one."""
        self._num_malformed += 1
        _log.warning("malformed message %d from the engine: %s", self._num_malformed, reason)
        if frames and frames[0] in {bytes([kind]) for kind in _ESSENTIAL}:
            kind = Kind(frames[0][0]).name.capitalize()
            self._end_link(WorkerError(ExitCode.BUG, f"a {kind} from the engine cannot be read: {reason}"))

    def _heartbeat(self) -> None:
        if os.getppid() != self._parent:
            self._lose_engine(EngineError(ExitCode.RANK_LOST, "the process that started this rank is gone"))
        if self._is_greeted:
            # If the queue is full, a heartbeat is late anyway.
            with contextlib.suppress(zmq.Again):
                self._dealer.send_multipart(encode(Heartbeat(rank=self._rank, step=self.last_step)), flags=zmq.NOBLOCK)

    def _lose_engine(self, failure: EngineError) -> None:
        # Messages that came in before the end go first: they may say why.
        self._take_all()
        self._end_link(failure)

    def _end_link(self, failure: WorkerError) -> None:
        """Stop receiving; the loop gets the first reason and closes the link, or this thread ends the process."""
        if self._failure is not None or self._has_left:
            return
        self._failure = failure
        self._exit_at = time.monotonic() + _COMEBACK_SECONDS
        self._inbox.put(failure)
        self._fail_asked(failure)
        self._poller.unregister(self._dealer)
        self._poller.unregister(self._monitor)

    def _fail_asked(self, failure: WorkerError) -> None:
        while self.asked:
            _, answer = self.asked.popitem()
            answer.set_exception(failure)

    def _close(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._outbox.close(linger=0)
        self._dealer.close(linger=_FLUSH_MILLISECONDS)


def _end_process(failure: WorkerError) -> None:
    """End this process where its loop does not: the kernel frees the memory of its GPU."""
    _log.error("%s (exit code %d)", failure.reason, failure.code)
    logging.shutdown()
    os._exit(int(failure.code))


def _dealer(context: zmq.Context[zmq.Socket[bytes]], rank: int) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, f"rank-{rank}".encode())
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    dealer.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    return dealer
