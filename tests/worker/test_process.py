"""A worker process and the wire: the handshake, serving, and every way to end."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from models import recall_tasks as tasks
from plait_proto import (
    Bye,
    Drain,
    ExitCode,
    Fail,
    Hello,
    Plan,
    StepResult,
    Vote,
    config_fingerprint,
    encode,
    encode_config,
)
from plait_testing import budgets
from plait_testing.engine_side import EngineSide, engine_side, welcome
from plait_testing.stepper import words
from plait_testing.tiny_models import config_for, save_tiny_llama
from plait_worker.link import _HEARTBEAT_SECONDS

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return folder


@pytest.fixture
def engine() -> Iterator[EngineSide]:
    with engine_side() as side:
        yield side


def test_a_worker_says_hello_serves_survives_noise_and_drains(engine: EngineSide, tiny: Path) -> None:
    config = config_for(tiny, engine.folder, num_pages=99)
    hello, stepper = engine.greet(config)
    assert hello.config == config_fingerprint(encode_config(config))
    assert (hello.protocol, hello.rank, hello.world, hello.num_pages, hello.dtype) == (1, 0, 1, 99, "float32")
    assert hello.pid == engine.processes[0].pid
    assert hello.page_bytes == 2 * 2 * 2 * 16 * 16 * 4
    assert hello.weight_bytes > 64 * 300 * 4 * 2

    slot = stepper.admit(list(range(50)))
    stepper.step(prefill={slot: 20})
    engine.send_frames([b"", b""])
    engine.send_frames([b"\x63", b"\x90"])
    engine.send_frames([b"\x08"] * 9)
    engine.send(Vote(0, 1, 0, 0, 0, False, False, False, False))
    os.kill(hello.pid, signal.SIGINT)
    stepper.step(prefill={slot: 30})
    other = stepper.admit([5] * 70, temperature=1.0, seed=4)
    stepper.step(prefill={other: 70}, decode=[slot])
    assert len(stepper.requests[slot].output) == 2

    engine.num_heartbeats = 0
    deadline = time.monotonic() + 60
    while engine.num_heartbeats < 3:
        assert time.monotonic() < deadline
        with pytest.raises(TimeoutError):  # nothing comes but heartbeats
            engine.receive(seconds=0.6)
    engine.send(Drain())
    assert engine.expect(Bye) == Bye(rank=0, num_steps=4)
    code, errors = engine.ending()
    assert code == 0
    assert "num_prefill_tokens=122" in errors  # 2 + 20 + 30 + 70


def test_two_heartbeats_come_before_the_engine_calls_one_late() -> None:
    timeouts = (budgets.ROOT / "router/engine/src/timeouts.rs").read_text()
    [milliseconds] = re.findall(r"heartbeat: Duration::from_millis\((\d+)\)", timeouts)
    assert int(milliseconds) > 2 * 1000 * _HEARTBEAT_SECONDS


def test_two_plans_may_be_in_flight(engine: EngineSide, tiny: Path) -> None:
    _, stepper = engine.greet(config_for(tiny, engine.folder))
    slot = stepper.admit([1, 2, 3])
    stepper.step(prefill={slot: 3})
    engine.send(decode_plan(2, start=3))
    engine.send(decode_plan(3, start=4))
    assert [engine.expect(StepResult).step for _ in range(2)] == [2, 3]


def decode_plan(step: int, start: int) -> Plan:
    return Plan(step, 0, 1, (), None, words([0, start]), b"", b"", b"")


def test_an_engine_that_sends_far_beyond_the_credit_is_refused(engine: EngineSide, tiny: Path) -> None:
    """It is stopped until all has been sent: after the first messages it may be gone."""
    worker = engine.start(config_for(tiny, engine.folder))
    engine.expect(Hello)
    worker.send_signal(signal.SIGSTOP)
    for _ in range(40):
        engine.send(welcome(64))
    worker.send_signal(signal.SIGCONT)
    fail, code, _ = engine.failure()
    assert code == ExitCode.BUG
    assert "credit" in fail.reason or "Welcome instead of a plan" in fail.reason


def test_a_rank_that_waits_for_another_ends_when_the_engine_says_so(engine: EngineSide, tiny: Path) -> None:
    engine.start(config_for(tiny, engine.folder, world=2))
    engine.send_when_dialled(Fail(rank=1, code=ExitCode.RANK_LOST, reason="rank 1 was lost"))
    code, errors = engine.ending()
    assert code == ExitCode.RANK_LOST
    assert "rank 1 was lost (exit code 5)" in errors.splitlines()[-1]


def test_a_stranger_is_told_why_and_exits_with_that_code(engine: EngineSide, tiny: Path) -> None:
    engine.start(config_for(tiny, engine.folder))
    engine.expect(Hello)
    engine.send(Fail(rank=0, code=ExitCode.SETTINGS, reason="the configuration is of another run"))
    code, errors = engine.ending()
    assert code == ExitCode.SETTINGS
    assert "the configuration is of another run" in errors.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "code", "reason"),
    [
        ({"model": "/nowhere/at-all"}, ExitCode.MODEL_FILES, "/nowhere/at-all"),
        ({"dtype": "int3"}, ExitCode.SETTINGS, "int3"),
        ({"world": 0}, ExitCode.SETTINGS, "--rank 0 of a world of 0"),
        ({"max_model_len": 2_000_000_000}, ExitCode.HARDWARE, "lower --max-model-len"),
        ({"num_pages": 2_000_000_000}, ExitCode.HARDWARE, "pages fit"),
        ({"memory_fraction": 0.0}, ExitCode.HARDWARE, "--memory-fraction"),
        ({"k_scale": 0.5}, ExitCode.SETTINGS, "--k-scale and --v-scale are for an FP8 cache"),
        ({"draft_tokens": 2}, ExitCode.SETTINGS, "draft_tokens is 2: no attention backend"),
    ],
)
def test_what_cannot_be_served_fails_with_its_code_and_a_sentence(
    engine: EngineSide, tiny: Path, changes: dict[str, object], code: ExitCode, reason: str
) -> None:
    engine.start(config_for(tiny, engine.folder, **changes))
    fail, returncode, errors = engine.failure()
    assert (fail.code, returncode) == (code, code)
    assert reason in fail.reason
    assert reason in errors.splitlines()[-1]
    assert "Traceback" not in errors


def test_a_drain_instead_of_a_welcome_is_an_end_on_every_rank(engine: EngineSide, tiny: Path) -> None:
    config = config_for(tiny, engine.folder, world=2)
    for rank in (0, 1):
        engine.start(config, rank=rank)
    assert {engine.expect(Hello).rank, engine.expect(Hello).rank} == {0, 1}
    for rank in (1, 0):
        engine.send(Drain(), rank)
    assert {engine.expect(Bye).rank, engine.expect(Bye).rank} == {0, 1}
    assert [process.wait(timeout=180) for process in engine.processes] == [0, 0]


def test_a_plan_that_cannot_be_decoded_ends_the_worker_with_the_reason(engine: EngineSide, tiny: Path) -> None:
    engine.greet(config_for(tiny, engine.folder))
    engine.send_frames([*encode(decode_plan(1, start=0))[:-1], b"odd"])
    fail, code, errors = engine.failure()
    assert code == fail.code == ExitCode.BUG
    assert "a Plan from the engine cannot be read" in fail.reason
    assert "Traceback" not in errors


def test_a_plan_that_contradicts_the_slots_ends_the_worker_with_the_reason(engine: EngineSide, tiny: Path) -> None:
    engine.greet(config_for(tiny, engine.folder))
    engine.send(decode_plan(1, start=0))
    fail, code, _ = engine.failure()
    assert code == fail.code == ExitCode.BUG
    assert "does not start where" in fail.reason


def test_a_worker_whose_engine_hangs_up_exits(engine: EngineSide, tiny: Path) -> None:
    engine.greet(config_for(tiny, engine.folder))
    engine.hang_up()
    code, errors = engine.ending()
    assert code == ExitCode.RANK_LOST
    assert "the engine closed the link" in errors


def test_sigterm_ends_a_worker_at_once(engine: EngineSide, tiny: Path) -> None:
    engine.greet(config_for(tiny, engine.folder))
    engine.processes[0].terminate()
    assert engine.processes[0].wait(timeout=60) == -signal.SIGTERM


def test_a_worker_whose_parent_was_gone_before_it_began_ends(engine: EngineSide, tiny: Path) -> None:
    process = engine.start(config_for(tiny, engine.folder), "--parent", str(os.getppid()))
    _, errors = process.communicate(timeout=180)
    assert process.returncode == ExitCode.RANK_LOST
    assert f"process {os.getppid()}, which started this one, is gone" in errors


def test_a_worker_dies_with_its_parent(engine: EngineSide, tiny: Path) -> None:
    config = engine.folder / "config.json"
    config.write_bytes(encode_config(config_for(tiny, engine.folder)))
    words = [sys.executable, "-m", "plait_worker", "--connect", engine.endpoint, "--rank", "0", "--config", str(config)]
    script = f"import subprocess; subprocess.Popen({words!r}, start_new_session=True).wait()"
    parent = subprocess.Popen([sys.executable, "-c", script])
    hello = engine.expect(Hello)
    worker = os.pidfd_open(hello.pid)
    parent.kill()
    parent.wait()
    assert is_readable_within(worker, seconds=60)
    os.close(worker)


def is_readable_within(descriptor: int, seconds: float) -> bool:
    """A pidfd is readable when its process has ended."""
    poll = select.poll()
    poll.register(descriptor)
    return bool(poll.poll(seconds * 1000))


def test_a_rank_looks_for_garbage_once_its_modules_are_loaded() -> None:
    script = f"""
import gc, os, runpy, sys

os._exit = lambda code: print(code, gc.isenabled(), gc.get_freeze_count() > 10_000, "torch" in sys.modules)
sys.argv = ["plait_worker", "--spare", "{os.getpid()}"]
runpy.run_module("plait_worker", run_name="__main__")
"""
    words = [sys.executable, "-c", script]
    ended = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=180, check=False)
    assert ended.stdout.split() == ["0", "True", "True", "True"], ended.stderr


def test_a_missing_configuration_file_is_a_settings_error(engine: EngineSide) -> None:
    words = [sys.executable, "-m", "plait_worker", "--connect", engine.endpoint, "--rank", "0", "--config", "/nowhere"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=180, check=False)
    assert ended.returncode == ExitCode.SETTINGS
    assert "--config /nowhere" in ended.stderr.splitlines()[-1]
    assert engine.expect(Fail).code == ExitCode.SETTINGS


def test_recall_gqa_answers_through_mixed_steps(engine: EngineSide, check_models: Path) -> None:
    config = config_for(check_models / "recall-gqa", engine.folder, page_size=64, max_model_len=2048, threads=1)
    _, stepper = engine.greet(config, num_pages=128)
    problems = recall_problems(num=4)
    slots = [stepper.admit(prompt) for prompt, _ in problems]
    waiting, decoding = list(slots), list[int]()
    while waiting or decoding:
        chunk = {slot: min(150, stepper.requests[slot].num_left) for slot in waiting[:1]}
        stepper.step(chunk, decoding)
        waiting = [slot for slot in waiting if stepper.requests[slot].num_left > 0]
        decoding = [slot for slot in slots if slot not in waiting and not has_ended(stepper.requests[slot].output)]
    answers = [bytes(stepper.requests[slot].output[:-1]).decode(errors="replace") for slot in slots]
    assert answers == [answer for _, answer in problems]


def has_ended(output: list[int]) -> bool:
    return output[-1] == 257 or len(output) > 300


def recall_problems(num: int) -> list[tuple[list[int], str]]:
    """Prompts as byte-level tokens, with their answers."""
    prompts = []
    for problem in tasks.problems(3, num, 400):
        ids = [tasks.BOS]
        for message in problem["messages"]:
            ids += [tasks.SYSTEM if message["role"] == "system" else tasks.USER, *message["content"].encode()]
        prompts.append(([*ids, tasks.ASSISTANT], problem["answer"]))
    return prompts
