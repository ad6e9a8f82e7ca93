"""How a launch ends: the root cause among several, restarts and their budget, and the combined log."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from plait.errors import SettingsError, StartError
from plait.nodes.causes import Causes, gave_up
from plait.nodes.layout import plan_layout
from plait.nodes.loaded_ranks import LoadedRanks
from plait.nodes.log_lines import Line, LogLines, LogWriter, Source, read_line
from plait.nodes.messages import Cause
from plait.output import say
from plait.restarts import WINDOW_SECONDS, Policy, RestartBudget, restart_file_held

KILLED = Cause(code=5, reason="rank 0 was lost: worker 0 was killed by SIGKILL")
GONE = Cause(code=5, reason="engine 1 (replica 1) is gone")
CYCLE = Cause(code=5, reason="engine 0 (replica 0) is gone")
MEMORY = Cause(code=3, reason="out of memory")


@pytest.mark.parametrize(
    ("causes", "node"),
    [
        ({1: KILLED}, 1),
        ({0: GONE, 1: KILLED}, 1),
        ({1: KILLED, 0: GONE}, 1),
        ({0: GONE}, 0),
        ({0: GONE, 1: CYCLE}, 1),
        ({0: GONE, 2: MEMORY}, 2),
        ({2: GONE, 1: CYCLE, 0: KILLED}, 0),
    ],
)
def test_the_root_cause_is_a_nodes_own_wherever_it_was_heard_of_first(causes: dict[int, Cause], node: int) -> None:
    assert root(causes, dp=4) == (node, causes[node])


@pytest.mark.parametrize(
    ("reason", "expected"), [("engine 1 gave up: rank 0: out of memory", True), (GONE.reason, False)]
)
def test_an_engine_that_gave_up_has_a_cause_of_its_own_to_come(reason: str, expected: bool) -> None:
    assert gave_up(Cause(code=5, reason=reason)) is expected


LINK = Cause(code=5, reason="rank 2 was lost: its link was closed: its process ended, or its host cannot be reached")
RANK = Cause(code=5, reason="rank 2 was killed by SIGKILL")
REPORT = Cause(code=5, reason="rank 0: another rank cannot be reached any more", is_report=True)
NO_WORD = Cause(code=5, reason="no word from 10.0.0.2 for 6 s; it ended, hangs or is cut off")
TOLD = Cause(code=3, reason="rank 2: out of memory")


@pytest.mark.parametrize(
    ("causes", "node"),
    [
        ({0: LINK, 1: RANK}, 1),
        ({1: RANK, 0: LINK}, 1),
        ({0: LINK, 1: NO_WORD}, 1),
        ({1: REPORT, 0: KILLED}, 0),
        ({1: REPORT, 0: LINK}, 0),
        ({0: TOLD, 1: TOLD}, 1),
        ({0: TOLD}, 0),
        ({0: LINK}, 0),
    ],
)
def test_a_rank_of_the_heads_engine_is_blamed_on_its_node(causes: dict[int, Cause], node: int) -> None:
    assert root(causes, dp=1) == (node, causes[node])


def root(causes: dict[int, Cause], dp: int) -> tuple[int, Cause]:
    """Of four nodes, or of two with one replica on both."""
    all_causes = Causes(plan_layout(num_nodes=4 if dp == 4 else 2, tp=4, dp=dp, dp_attention=False, gpus_per_node=0))
    for node, cause in causes.items():
        all_causes.add(node, cause)
    return all_causes.root()


@pytest.mark.parametrize(
    ("policy", "delays"),
    [
        ("never", [None, None]),
        ("group", [0.0, 0.0, 0.0, None]),
        ("backoff", [5.0, 10.0, 20.0, None]),
    ],
)
def test_a_loss_is_followed_by_restarts_as_far_as_the_budget_goes(policy: Policy, delays: list[float | None]) -> None:
    budget = RestartBudget(policy, 3, None)
    assert [budget.after_loss(5, float(now)) for now in range(len(delays))] == delays


@pytest.mark.parametrize("code", [0, 2, 3, 4])
def test_what_another_start_does_not_mend_is_not_restarted(code: int) -> None:
    assert RestartBudget("group", 3, None).after_loss(code, 0.0) is None


@pytest.mark.parametrize(("code", "expected"), [(0, None), (1, 0.0), (2, None), (3, 0.0), (4, None), (5, 0.0)])
def test_memory_that_runs_out_once_the_server_was_ready_is_a_loss(code: int, expected: float | None) -> None:
    assert RestartBudget("group", 3, None).after_loss(code, 0.0, has_served=True) == expected


def test_losses_older_than_an_hour_do_not_count() -> None:
    budget = RestartBudget("group", 1, None)
    assert budget.after_loss(5, 0.0) == 0.0
    assert budget.after_loss(5, 1.0) is None
    assert budget.after_loss(5, 2.0 + WINDOW_SECONDS) == 0.0


def test_a_new_launcher_counts_on_from_the_file(tmp_path: Path) -> None:
    file = str(tmp_path / "restarts")
    assert RestartBudget("backoff", 2, file).after_loss(5, 100.0) == 5.0
    again = RestartBudget("backoff", 2, file)
    assert again.delay_at_start(102.0) == 3.0
    assert again.delay_at_start(200.0) == 0.0
    assert again.after_loss(5, 200.0) == 10.0
    assert again.after_loss(5, 300.0) is None
    with pytest.raises(StartError, match="has 3 losses within an hour, --restart-budget allows 2"):
        RestartBudget("backoff", 2, file).delay_at_start(301.0)


def test_the_load_ends_when_the_last_rank_of_the_last_node_has_its_weights() -> None:
    layout = plan_layout(num_nodes=2, tp=2, dp=2, dp_attention=False, gpus_per_node=0)
    loaded = LoadedRanks(layout)

    def say_on(node: int, line: str) -> list[int]:
        loaded.note(read_line(f"2026-11-23 10:00:00,000 {line}", node, layout.first_rank_of_engine(node)))
        return loaded.missing()

    assert say_on(0, "INFO rank 0: weights: 1.2 s") == [0, 1]
    assert say_on(0, "INFO rank 1: weights: 1.4 s") == [1]
    assert say_on(1, "INFO rank 0: attention: 0.1 s") == [1]
    assert say_on(1, "INFO weights: 1.2 s") == [1], "no rank says it"
    assert say_on(1, "INFO rank 1: weights: 1.2 s") == [1]
    assert say_on(1, "INFO rank 0: weights: 1.2 s") == []


@pytest.mark.parametrize("content", ["{", '["a"]', "x" * (1 << 17)])
def test_a_file_of_something_else_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "restarts").write_text(content)
    with pytest.raises(SettingsError, match="--restart-file"):
        RestartBudget("group", 2, str(tmp_path / "restarts"))


@pytest.mark.parametrize("folder", ["gone", "file"])
def test_a_file_that_cannot_be_written_is_refused_at_the_start(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"--restart-file .* cannot be (written|read)"):
        RestartBudget("group", 2, str(tmp_path / folder / "restarts"))


def test_a_link_to_a_file_of_restarts_stays_one(tmp_path: Path) -> None:
    kept, link = tmp_path / "kept", tmp_path / "link"
    kept.mkdir()
    link.symlink_to(kept / "restarts")
    assert RestartBudget("group", 1, str(link)).after_loss(5, 1.0) == 0.0
    assert RestartBudget("group", 1, str(kept / "restarts")).after_loss(5, 2.0) is None
    assert link.is_symlink()


def test_a_file_belongs_to_one_living_launcher(tmp_path: Path) -> None:
    file = str(tmp_path / "restarts")
    with restart_file_held(file):
        RestartBudget("group", 2, file).after_loss(5, 1.0)  # the file is another one now
        with pytest.raises(SettingsError, match="counts the losses of a server that runs"), restart_file_held(file):
            pass
        with restart_file_held(str(tmp_path / "other")), restart_file_held(None):
            pass
    with restart_file_held(file):
        pass


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("all of it")
    (tmp_path / ".restarts.lock").symlink_to(tmp_path / "thesis")
    file = str(tmp_path / "restarts")
    with pytest.raises(SettingsError, match="cannot be written: Too many levels"), restart_file_held(file):
        pass
    assert (tmp_path / "thesis").read_text() == "all of it"


def test_a_pipe_in_place_of_the_lock_stops_no_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".restarts.lock")
    with restart_file_held(str(tmp_path / "restarts")):
        pass


def test_a_file_in_a_folder_that_is_gone_is_held_by_nobody(tmp_path: Path) -> None:
    file = str(tmp_path / "gone" / "restarts")
    with pytest.raises(SettingsError, match="cannot be written: No such file or dir"), restart_file_held(file):
        pass


STAMP = "2026-11-23 10:22:07,{} "


def test_equal_lines_become_one_with_the_names_of_all_who_said_them() -> None:
    lines = LogLines()
    for node in (0, 1, 2, 4):
        for rank in (0, 1):
            lines.add(read_line(f"{STAMP.format(100 + node)}INFO rank {rank}: loaded", node, 2 * node), 0.0)
    lines.add(Line(Source(1, None), "only here"), 0.0)
    assert list(lines.due(0.1)) == []
    assert list(lines.due(1.0)) == [
        f"[nodes 0-2,4 ranks 0-5,8-9] {STAMP.format(100)}INFO loaded",
        "[node 1] only here",
    ]
    assert list(lines.due(2.0)) == []


def test_a_line_that_one_node_repeats_is_counted() -> None:
    lines = LogLines()
    for _ in range(3):
        lines.add(Line(Source(0, 1), "again"), 0.0)
    assert list(lines.due(1.0)) == ["[node 0 rank 1] again (3 times)"]


def test_the_combined_log_ends_and_the_server_runs_on_if_the_disk_is_full(capfd: pytest.CaptureFixture[str]) -> None:
    log = LogWriter("/dev/full")
    for _ in range(2):
        log.add(Line(Source(0, None), "line"))
        log.flush(all_lines=True)
    assert capfd.readouterr().err.count("The combined log ends here: No space left") == 1


def test_a_line_for_a_full_disk_is_dropped() -> None:
    with open("/dev/full", "w") as full:
        say("one", full)
        say("two", full)


def test_the_combined_log_is_appended_to(tmp_path: Path) -> None:
    file = tmp_path / "log"
    for text in ("one", "two"):
        log = LogWriter(str(file))
        log.add(Line(Source(0, None), text))
        log.flush(all_lines=True)
    assert file.read_text() == "[node 0] one\n[node 0] two\n"


def test_ranks_start_again_at_once_after_their_first_loss() -> None:
    budget = RestartBudget("backoff", 4, None, is_first_at_once=True)
    assert [budget.after_loss(5, float(now)) for now in range(5)] == [0.0, 5.0, 10.0, 20.0, None]


def test_a_file_counts_the_restarts_of_a_model_whose_path_is_not_utf_8(tmp_path: Path) -> None:
    file, model = str(tmp_path / "restarts"), os.fsdecode(b"/models/\xff")
    assert RestartBudget("group", 1, file, model=model).after_loss(5, 1.0) == 0.0
    assert RestartBudget("group", 1, file, model=model).after_loss(5, 2.0) is None


def test_a_restart_file_belongs_to_one_model(tmp_path: Path) -> None:
    file = str(tmp_path / "restarts")
    assert RestartBudget("group", 1, file, model="/a").after_loss(5, 1.0) == 0.0
    assert RestartBudget("group", 1, file, model="/a").after_loss(5, 2.0) is None
    for other in ("/b", None):
        with pytest.raises(SettingsError, match="counts the restarts of /a, not of"):
            RestartBudget("group", 1, file, model=other)
