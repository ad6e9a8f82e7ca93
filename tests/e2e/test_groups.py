"""Engines that step together: the same answers as alone, the same sequence of steps, one end."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
import zmq
from plait.cli import run
from plait_testing import recall
from plait_testing.held_port import held_port
from plait_testing.metrics import read_metrics
from plait_testing.running_server import Server, spawn_server, wait_until_ready
from plait_testing.slow_steps import SlowSteps

LONG = {"prompt": "count 1 9", "max_tokens": 300, "ignore_eos": True, "stream": True}
StartGroup = Callable[[int], list[Server]]


def place(engine: int, num_engines: int, endpoint: str) -> list[str]:
    """The flags of one engine of a group."""
    return [
        *("--group-engines", str(num_engines), "--group-engine", str(engine)),
        *("--group-endpoint", endpoint),
    ]


def spawn(folder: Path, check_models: Path, engine: int, *words: str) -> Server:
    """Start an engine of recall-gqa with these flags."""
    command = ["-m", "plait.cli", "serve", str(check_models / "recall-gqa"), *words]
    flags = ["--port", "0", "--threads", "1", "--max-model-len", "1024"]
    return spawn_server(folder / f"engine-{engine}.log", *command, *flags)


@pytest.fixture
def group(slow_steps: SlowSteps, tmp_path: Path, check_models: Path) -> Iterator[StartGroup]:
    """`group(num_engines)` starts engines of recall-gqa that meet in a directory of their own."""
    started: list[Server] = []

    def start(num_engines: int) -> list[Server]:
        meeting = tmp_path / "group"
        meeting.mkdir(mode=0o700)
        for engine in range(num_engines):
            words = place(engine, num_engines, f"ipc://{meeting}/votes")
            started.append(spawn(tmp_path, check_models, engine, *words))
        for one in started:
            wait_until_ready(one)
            assert one.url, one.errors
        return started

    yield start
    for one in started:
        one.kill()


def steps(running: Server) -> dict[str, float]:
    """The last agreed step, and the replica's steps with rows and without."""
    metrics = read_metrics(running.url)
    kinds = [metrics[f'plait_steps_total{{kind="{kind}"}}'] for kind in ("prefill", "decode", "mixed")]
    return {
        "agreed": metrics["plait_group_step"],
        "own": sum(kinds),
        "dummy": metrics["plait_group_dummy_steps_total"],
    }


def settled(servers: list[Server]) -> list[dict[str, float]]:
    """The same, once no engine steps any more: one that is behind has yet to catch up."""
    deadline = time.monotonic() + 60
    before: list[dict[str, float]] = []
    while (now := [steps(one) for one in servers]) != before or not are_level(now):
        if time.monotonic() > deadline:
            break
        before = now
        time.sleep(0.2)
    return now


def are_level(counts: list[dict[str, float]]) -> bool:
    """All engines have made the same number of steps, up to the one that was agreed last."""
    return len({(count["agreed"], count["own"] + count["dummy"]) for count in counts}) == 1


def num_generated(running: Server) -> float:
    return read_metrics(running.url)["plait_generated_tokens_total"]


def begin_long(running: Server, pool: ThreadPoolExecutor) -> Callable[[], list[str]]:
    """A long streamed answer that has begun; call what this returns for all of its events.

    Raises `TimeoutError` if it does not begin.
    """
    begun: list[str] = []
    enough = num_generated(running) + 3

    def read() -> list[str]:
        with httpx.stream("POST", f"{running.url}/v1/completions", json=LONG, timeout=120) as got:
            begun.extend(line.removeprefix("data: ") for line in got.iter_lines() if line)
        return begun

    reading = pool.submit(read)
    deadline = time.monotonic() + 60
    while num_generated(running) < enough:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{num_generated(running)} tokens")
        time.sleep(0.02)
    return reading.result


@contextmanager
def unread_streams(running: Server) -> Iterator[None]:
    """A client that asks for a long answer, and for one whose prompt takes long to tokenise, and reads neither."""
    url = httpx.URL(running.url)
    prompts = (LONG, {**LONG, "prompt": "count 1 9 " * 50_000})
    with ExitStack() as stack:
        for asked in prompts:
            body = json.dumps(asked).encode()
            client = stack.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            client.connect((url.host, url.port or 80))
            head = f"POST /v1/completions HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        yield


def test_a_group_under_uneven_load_answers_as_alone_in_lockstep_and_drains_as_one(
    group: StartGroup, slow_steps: SlowSteps
) -> None:
    servers = group(3)
    asked = recall.problems(11, 6, 512)
    with unread_streams(servers[0]), ThreadPoolExecutor(2) as pool:
        wrong = list(
            pool.map(
                lambda part: recall.ask_all(part[0].url, part[1]), [(servers[0], asked[:5]), (servers[1], asked[5:])]
            )
        )
    assert wrong == [[], []]
    counts = settled(servers)
    assert len({count["agreed"] for count in counts}) == 1, counts
    assert len({count["own"] + count["dummy"] for count in counts}) == 1, counts
    assert counts[2]["own"] == 0
    assert counts[2]["dummy"] > 0
    with ThreadPoolExecutor(1) as pool:
        with slow_steps.within():
            answer = begin_long(servers[0], pool)
            servers[1].process.send_signal(signal.SIGTERM)
            servers[0].wait_until_draining()
        events = answer()
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert [one.wait() for one in servers] == [0, 0, 0]


def test_a_killed_engine_ends_the_others_which_name_it(group: StartGroup, slow_steps: SlowSteps) -> None:
    servers = group(2)
    slow_steps.begin()
    with ThreadPoolExecutor(1) as pool:
        answer = begin_long(servers[0], pool)
        servers[1].process.kill()
        events = answer()
    assert "error" in json.loads(events[-1])
    assert servers[0].wait() == 5
    assert "engine 1 (replica 1) is gone" in servers[0].last_line


@pytest.fixture
def key_files(tmp_path: Path) -> Callable[[int, int], list[str]]:
    """`key_files(engine, num_engines)` gives an engine's flags for keys; all engines share one list of public keys."""
    pairs = [zmq.curve_keypair() for _ in range(4)]

    def flags(engine: int, num_engines: int) -> list[str]:
        public, secret = tmp_path / "public.keys", tmp_path / f"secret-{engine}.key"
        public.write_text("".join(pair[0].decode() + "\n" for pair in pairs[:num_engines]))
        secret.touch(mode=0o600)
        secret.write_text(pairs[engine][1].decode() + "\n")
        return ["--group-secret-key-file", str(secret), "--group-public-keys-file", str(public)]

    return flags


@pytest.fixture
def tcp_endpoint() -> Iterator[str]:
    with held_port() as port:
        yield f"tcp://127.0.0.1:{port}"


def test_engines_with_keys_meet_over_tcp_and_answer_as_alone(
    tmp_path: Path, check_models: Path, key_files: Callable[[int, int], list[str]], tcp_endpoint: str
) -> None:
    words = [[*place(engine, 2, tcp_endpoint), *key_files(engine, 2), "--dp", "2"] for engine in (0, 1)]
    servers = [spawn(tmp_path, check_models, engine, *words[engine]) for engine in (0, 1)]
    try:
        for one in servers:
            wait_until_ready(one)
            assert one.url, one.errors
        asked = recall.problems(11, 4, 512)
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(lambda one: recall.ask_all(one.url, asked), servers)) == [[], []]
        assert servers[1].stop(signal.SIGTERM) == 0
        assert servers[0].wait() == 0
    finally:
        for one in servers:
            one.kill()


def test_an_engine_with_a_key_that_is_not_listed_is_refused_and_says_so(
    tmp_path: Path, check_models: Path, key_files: Callable[[int, int], list[str]], tcp_endpoint: str
) -> None:
    first = spawn(tmp_path, check_models, 0, *place(0, 2, tcp_endpoint), *key_files(0, 2))
    listed = (tmp_path / "public.keys").read_text().split()
    public, secret = (key.decode() for key in zmq.curve_keypair())
    files = [tmp_path / "strangers.keys", tmp_path / "stranger.key"]
    files[0].write_text(f"{listed[0]}\n{public}\n")
    files[1].touch(mode=0o600)
    files[1].write_text(secret)
    words = ["--group-public-keys-file", str(files[0]), "--group-secret-key-file", str(files[1])]
    second = spawn(tmp_path, check_models, 1, *place(1, 2, tcp_endpoint), *words)
    try:
        assert second.wait() == 2
        assert "key" in second.last_line
        assert first.process.poll() is None
    finally:
        first.kill()
        second.kill()


def test_two_engines_with_one_number_end_the_group_which_names_it(tmp_path: Path, check_models: Path) -> None:
    meeting = tmp_path / "group"
    meeting.mkdir(mode=0o700)
    folders = [tmp_path / name for name in ("first", "second", "twin")]
    for folder in folders:
        folder.mkdir()
    servers = [
        spawn(folder, check_models, number, *place(number, 3, f"ipc://{meeting}/votes"))
        for folder, number in zip(folders, (0, 1, 1), strict=True)
    ]
    try:
        assert [one.wait() for one in servers] == [2, 2, 2]
        assert "two engines say that they are engine 1" in servers[0].last_line
    finally:
        for one in servers:
            one.kill()


def test_a_second_engine_0_is_refused_and_the_group_serves_on(
    group: StartGroup, tmp_path: Path, check_models: Path
) -> None:
    engines = group(2)
    folder = tmp_path / "twin"
    folder.mkdir()
    twin = spawn(folder, check_models, 0, *place(0, 2, f"ipc://{tmp_path}/group/votes"))
    assert twin.wait() == 2
    assert "is taken: engine 0 of a group listens there" in twin.last_line
    assert all(recall.ask_all(one.url, recall.problems(9, 1, 256)) == [] for one in engines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--group-engines", "2"], "--group-engines needs --group-endpoint"),
        (["--group-engine", "1"], "--group-engine needs --group-engines"),
        (["--group-engines", "2", "--group-engine", "2"], "a group of 2 has engines 0 to 1"),
        ([*place(0, 2, "tcp://127.0.0.1:1"), "--group-secret-key-file", "/x"], "belong together"),
        ([*place(0, 2, "tcp://127.0.0.1:1")], "without CURVE keys"),
        ([*place(0, 2, "ipc:///x"), "--itl-target-ms", "30"], "leave it out of a group"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    words: list[str], said: str, check_models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", str(check_models / "recall-gqa"), "--port", "0", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mode", "text", "said"),
    [
        (0o644, "s" * 40, "is open to other users; run `chmod 600"),
        (0o600, "s" * 39, "holds 1 words; it needs 1 of 40 characters"),
        (0o600, "", "holds 0 words"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused(
    mode: int, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret, public = tmp_path / "secret", tmp_path / "public"
    secret.write_text(text)
    secret.chmod(mode)
    public.write_text("p" * 40 + "\n" + "q" * 40)
    files = ["--group-secret-key-file", str(secret), "--group-public-keys-file", str(public)]
    assert run(["serve", "--port", "0", *place(0, 2, "tcp://127.0.0.1:1"), *files]) == 2
    assert said in capsys.readouterr().err
