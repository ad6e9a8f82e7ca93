"""The dashboard and the alerts name metrics that exist, and give values on a server that runs."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import yaml
from plait_testing import budgets
from plait_testing.held_port import held_port
from plait_testing.running_server import Server, start_server

PROMETHEUS = budgets.ROOT / "deploy" / "prometheus"
ALERTS = PROMETHEUS / "alerts.yaml"
QUERY_SECONDS = 60.0


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_dashboard", budgets.ROOT / "tools/generate_dashboard.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["generate_dashboard"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expressions() -> list[str]:
    """All queries of the dashboard."""
    document = json.loads((budgets.ROOT / "deploy/grafana/plait.json").read_bytes())
    return [target["expr"] for panel in document["panels"] for target in panel.get("targets", [])]


def alerts() -> list[dict[str, Any]]:
    rules: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
    return rules


def test_the_dashboard_is_what_its_generator_writes() -> None:
    generated = generator().text()
    current = (budgets.ROOT / "deploy/grafana/plait.json").read_text()
    assert current == generated, "run `python tools/generate_dashboard.py`"


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    module = generator()
    assert set().union(*map(module.named, expressions())) == set(module.metrics())


def test_panels_lie_side_by_side() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in json.loads((budgets.ROOT / "deploy/grafana/plait.json").read_bytes())["panels"]:
        place = panel["gridPos"]
        own = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own


def test_steps_of_a_group_are_not_summed_over_its_engines() -> None:
    """Each engine of a group counts the same steps."""
    (query,) = [one for one in expressions() if "plait_group_step{" in one]
    assert query.startswith("max by (job) (")


def test_an_alert_names_metrics_that_exist_with_labels_that_they_have() -> None:
    page = (budgets.ROOT / "docs/metrics.md").read_text()
    module = generator()
    for alert in alerts():
        module.named(alert["expr"])
        for metric, reasons in re.findall(r'(plait_\w+)\{reason=~?"([^"]+)"\}', alert["expr"]):
            (row,) = re.findall(rf"^\| `{metric}` .*$", page, re.MULTILINE)
            assert all(reason in row for reason in reasons.split("|")), alert["alert"]


def test_an_alert_has_a_paragraph_and_a_test_in_which_it_fires() -> None:
    names = [alert["alert"] for alert in alerts()]
    headings = re.findall(r"^## (Plait\w+)$", (budgets.ROOT / "docs/alerts.md").read_text(), re.MULTILINE)
    assert headings == names
    links = [alert["annotations"]["runbook"] for alert in alerts()]
    assert links == [f"docs/alerts.md#{name.lower()}" for name in names]
    cases = yaml.safe_load((PROMETHEUS / "alerts.test.yaml").read_text())["tests"]
    fired = {rule["alertname"] for case in cases for rule in case["alert_rule_test"] if rule["exp_alerts"]}
    assert fired == set(names)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool; install Debian's package prometheus")
def test_promtool_agrees_with_each_alert() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts.test.yaml"], cwd=PROMETHEUS, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


KEY = "dashboard-key"


@pytest.fixture(scope="module")
def busy_server(check_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.touch(0o600)
    keys.write_text(KEY + "\n")
    flags = ["--max-seqs", "4", "--threads", "1", "--api-key-file", str(keys), "--admin-port", "0"]
    one = start_server(folder / "server.log", check_models / "recall-gqa", *flags)
    assert one.url, one.errors
    yield one
    one.kill()


@pytest.fixture(scope="module")
def prometheus(busy_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a Prometheus that scrapes the server's operators' listener, which alone has each key's use.

    Without its package the test is skipped.
    """
    if shutil.which("prometheus") is None:
        pytest.skip("no prometheus; install Debian's package prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    scrape = {"job_name": "plait", "static_configs": [{"targets": [admin_address(busy_server)]}]}
    config = {"global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config | {"rule_files": [str(ALERTS)]}))
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with held_port() as port, (folder / "log").open("w") as log:
        address = f"127.0.0.1:{port}"
        process = subprocess.Popen(["prometheus", *words, f"--web.listen-address={address}"], stderr=log)
        yield f"http://{address}"
    process.terminate()
    process.wait()


def admin_address(server: Server) -> str:
    line = "Admin listener: http://"
    return server.read_line(line).removeprefix(line).rstrip("/")


def ask(url: str, number: int) -> None:
    """Asks for an answer, and for one under a grammar that no other number has."""
    free = {"prompt": "0123 4567", "max_tokens": 8}
    constrained = free | {"structured_outputs": {"regex": f"[0-9]{{1,{number}}}"}}
    for body in (free | {"ignore_eos": True}, constrained):
        headers = {"Authorization": f"Bearer {KEY}"}
        httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()


def values(prometheus: str, query: str) -> list[float]:
    """Those of an instant query that are numbers; none while Prometheus starts."""
    try:
        answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": query}, timeout=60)
    except httpx.TransportError:
        return []
    if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return []
    answer.raise_for_status()
    found = [float(sample["value"][1]) for sample in answer.json()["data"]["result"]]
    return [value for value in found if value == value]


@pytest.mark.process
def test_each_query_gives_a_value_on_a_server_that_runs(busy_server: Server, prometheus: str) -> None:
    shown = [
        query.replace("$__rate_interval", "10s").replace("$job", ".*").replace("$instance", ".*")
        for query in expressions()
    ]
    shown.append('up{job="plait"} == 1')
    deadline, missing, numbers = time.monotonic() + QUERY_SECONDS, shown, count(1)
    while missing and time.monotonic() < deadline:
        ask(busy_server.url, next(numbers))
        time.sleep(0.2)
        missing = [query for query in missing if not values(prometheus, query)]
    assert missing == []
    rules = httpx.get(f"{prometheus}/api/v1/rules", timeout=60).json()["data"]["groups"][0]["rules"]
    assert [rule["health"] for rule in rules] == ["ok"] * len(alerts())
