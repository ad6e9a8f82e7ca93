"""The chat page of the front door and the live page of the admin listener, in a headless Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from plait_testing.chromium import Browser, Page, chromium
from plait_testing.running_server import Server, start_server
from plait_testing.slow_steps import SlowSteps

ADMIN_LINE = "Admin listener: "
ANSWERS = {"count 5 11": "5 6 7 8 9 10 11", "reverse banana": "ananab"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as one:
        yield one


@pytest.fixture(scope="module")
def open_server(
    check_models: Path, recall_steps: SlowSteps, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose listeners need no keys."""
    with recall_steps.of_servers():
        log = tmp_path_factory.mktemp("pages") / "log"
        one = start_server(log, check_models / "recall-gqa", "--threads=1", "--admin-port=0")
    assert one.url, one.errors
    yield one
    one.kill()


FACTS = """Object.fromEntries(
    [...document.querySelectorAll('#facts div')].map(fact => [...fact.children].map(part => part.textContent)))"""


def chat(page: Page) -> dict[str, str]:
    """Ask each question; what the page shows under it."""
    said = {}
    for number, question in enumerate(ANSWERS, start=1):
        page.type_and_enter("#text", question)
        answers = "document.querySelectorAll('.assistant')"
        page.wait_for(f"{answers}.length === {number} && document.querySelector('#send').textContent === 'Send'")
        said[question] = page.evaluate(f"{answers}[{number - 1}].innerText")
    return said


def test_a_user_chats_at_the_front_door(browser: Browser, open_server: Server) -> None:
    page = browser.open(open_server.url + "/")
    page.wait_for("document.querySelector('#model').textContent === 'recall-gqa'")
    assert chat(page) == ANSWERS
    assert page.evaluate("[...document.querySelectorAll('.user')].map(turn => turn.innerText)") == list(ANSWERS)
    page.evaluate("document.querySelector('#clear').click()")
    assert page.text("#talk") == ""
    assert page.problems == []
    paths = {url.removeprefix(open_server.url) for url in page.requests}
    assert paths == {"/", "/v1/models", "/v1/chat/completions"}, "nothing from elsewhere"


def test_a_stopped_answer_leaves_what_came(browser: Browser, open_server: Server, recall_steps: SlowSteps) -> None:
    page = browser.open(open_server.url + "/")
    with recall_steps.within():
        page.type_and_enter("#text", "count 100 150")
        page.wait_for("document.querySelector('.assistant')?.innerText.startsWith('100 ')")
        page.evaluate("document.querySelector('#send').click()")
        page.wait_for("document.querySelector('#send').textContent === 'Send'")
    came = page.text(".assistant")
    page.type_and_enter("#text", "reverse banana")
    page.wait_for("document.querySelectorAll('.assistant').length === 2")
    assert page.text(".assistant") == came
    assert page.problems == []


def test_an_operator_watches_a_request(browser: Browser, open_server: Server, recall_steps: SlowSteps) -> None:
    url = open_server.read_line(ADMIN_LINE).removeprefix(ADMIN_LINE)
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True}
    with ThreadPoolExecutor() as pool:
        with recall_steps.within():
            answer = pool.submit(httpx.post, open_server.url + "/v1/completions", json=body, timeout=120)
            page = browser.open(url + "/")
            page.wait_for(f"{FACTS}.running === '1' && {FACTS}['decode tokens/s'] > 0")
            page.wait_for(f"{is_drawn('tokens')} && {is_drawn('requests')} && {is_drawn('pages')}")
        assert answer.result().status_code == 200
    page.wait_for(f"{FACTS}.running === '0'")
    assert page.text("#state") == ""
    assert page.problems == []
    assert {asked.removeprefix(url) for asked in page.requests} == {"/", "/admin/events"}, "nothing from elsewhere"


def is_drawn(canvas: str) -> str:
    """A script: whether the chart has a bar in one of its two colours."""
    return f"""(() => {{
        const chart = document.getElementById("{canvas}");
        const {{ data }} = chart.getContext("2d").getImageData(0, 0, chart.width, chart.height);
        for (let at = 0; at < data.length; at += 4)
            if (data[at] === 0x2b && data[at + 1] === 0x83 && data[at + 2] === 0xd9) return true;
        return false;
    }})()"""


def test_each_page_asks_with_the_key_that_is_typed(
    browser: Browser, check_models: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for name in ("models", "operator"):
        (tmp_path / name).write_text(f"sk-{name}")
        (tmp_path / name).chmod(0o600)
    keys = (f"--api-key-file={tmp_path / 'models'}", f"--admin-key-file={tmp_path / 'operator'}", "--admin-port=0")
    server = start_server(tmp_path / "log", check_models / "recall-gqa", "--threads=1", *keys)
    try:
        page = browser.open(server.url + "/")
        page.wait_for("document.querySelector('#model').textContent.includes('key')")
        page.type_and_enter("#key", "sk-models")
        page.wait_for("document.querySelector('#model').textContent === 'recall-gqa'")
        assert chat(page) == ANSWERS
        assert ["401" in problem for problem in page.problems] == [True], "Chromium's own line of the first request"
        live = browser.open(server.read_line(ADMIN_LINE).removeprefix(ADMIN_LINE) + "/")
        live.wait_for("document.querySelector('#state').textContent.includes('key')")
        live.type_and_enter("#key", "sk-operator")
        live.wait_for("document.querySelectorAll('#facts div').length > 0")
    finally:
        server.kill()
