"""Plots of a run as PNG files; matplotlib comes with the extra `plait[bench]`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from plait.errors import SettingsError
from plait.simulate.report import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"prefill": "#4477aa", "decode": "#ccbb44", "mixed": "#228833"}
Runs = dict[str, Report]
"""Runs by their name in the legend; the requested one comes first."""


def require_matplotlib() -> None:
    """Raise `SettingsError` if matplotlib is missing, before anything is simulated."""
    if importlib.util.find_spec("matplotlib") is None:
        advice = "install it (`pip install 'plait[bench]'`) or leave --out away"
        raise SettingsError(f"--out draws plots with matplotlib, which is not installed; {advice}")


def draw(runs: Runs, folder: Path) -> None:
    """Write `composition.png`, `itl_tail.png`, and `mixed.png`, which compares the runs."""
    _save(_composition(runs), folder / "composition.png")
    _save(_itl_tail(runs), folder / "itl_tail.png")
    _save(_side_by_side(runs), folder / "mixed.png")


def _figure(num_columns: int, num_rows: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6 * num_columns, 3.2 * num_rows + 0.8), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False)
    return figure, list(axes.flat)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, dpi=110)


def _composition(runs: Runs) -> Figure:
    """Step composition over time: one column for each run, step time above, tokens below."""
    figure, axes = _figure(len(runs), 2)
    for (name, report), above, below in zip(runs.items(), axes[: len(runs)], axes[len(runs) :], strict=True):
        _draw_shares(above, report)
        above.set_title(name)
        _draw_tokens(below, report)
    _share_height(axes[len(runs) :])
    return figure


def _share_height(axes: list[Axes]) -> None:
    top = max(each.get_ylim()[1] for each in axes)
    for each in axes:
        each.set_ylim(0, top)


def _draw_shares(axes: Axes, report: Report) -> None:
    composition = report.composition
    shares = {
        "prefill": composition.prefill_share,
        "mixed": composition.mixed_share,
        "decode": composition.decode_share,
    }
    axes.stackplot(
        _bin_starts(report), *shares.values(), labels=shares, colors=[_COLOURS[name] for name in shares], step="post"
    )
    axes.set(ylabel="share of time in steps of a kind", ylim=(0, 1.05))
    axes.legend(loc="upper right", fontsize="small")


def _draw_tokens(axes: Axes, report: Report) -> None:
    composition = report.composition
    tokens = {"prefill": composition.prefill_tokens_per_second, "decode": composition.decode_tokens_per_second}
    axes.stackplot(
        _bin_starts(report), *tokens.values(), labels=tokens, colors=[_COLOURS[name] for name in tokens], step="post"
    )
    axes.set(xlabel="time, s", ylabel="tokens computed a second")
    axes.legend(loc="upper right", fontsize="small")


def _bin_starts(report: Report) -> list[float]:
    composition = report.composition
    return [index * composition.bin_seconds for index in range(len(composition.prefill_share))]


def _itl_tail(runs: Runs) -> Figure:
    """Share of gaps between tokens that are longer than a time; both scales logarithmic."""
    figure, (axes,) = _figure(1)
    for name, report in runs.items():
        shares, seconds = zip(*report.itl_tail, strict=True) if report.itl_tail else ((), ())
        axes.plot([each * 1e3 for each in seconds], shares, label=name, drawstyle="steps-post")
    axes.set(xscale="log", yscale="log", xlabel="time between tokens, ms", ylabel="share of gaps that are longer")
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _side_by_side(runs: Runs) -> Figure:
    """Percentiles of TTFT and ITL, and output tokens a second, for each run."""
    figure, axes = _figure(3)
    for index, (name, report) in enumerate(runs.items()):
        summary = report.summary
        offset = (index - (len(runs) - 1) / 2) * 0.35
        for each, times in zip(axes, (summary.ttft_seconds, summary.itl_seconds), strict=False):
            values = [times.p50 * 1e3, times.p90 * 1e3, times.p99 * 1e3, times.max * 1e3]
            each.bar([place + offset for place in range(4)], values, width=0.35, label=name)
        axes[2].bar(name, summary.output_tokens_per_second)
    for each, title in zip(axes, ("TTFT, ms", "ITL, ms", "output tokens/s"), strict=True):
        each.set_title(title)
    for each in axes[:2]:
        each.set(yscale="log", xticks=range(4), xticklabels=("p50", "p90", "p99", "max"))
        each.legend(fontsize="small")
    return figure
