"""PNG plots of a result; matplotlib is loaded only here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from plait.bench.compare import METRICS, ratios, value
from plait.bench.measure import Measured
from plait.bench.metrics import Timed, timed_request, tokens_by_second
from plait.bench.pace import ClosedLoop
from plait.bench.sweep import knee, knee_words, load_points
from plait.errors import SettingsError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE_INCHES = (8.0, 5.0)
DPI = 110
MAX_RUNS = 10
"""More lines in a plot cannot be told apart."""


def require_matplotlib() -> None:
    """Raise `SettingsError` if matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SettingsError(
            "plots need matplotlib, which is not installed; run `pip install 'plait[bench]'`, or give --no-plots"
        ) from None


def draw(runs: list[Measured], folder: Path, name: str) -> list[Path]:
    """Draw every plot that these runs have data for; the files."""
    from matplotlib.figure import Figure

    drawn: list[Path] = []
    for kind, paint in _PLOTS.items():
        figure = Figure(figsize=SIZE_INCHES)
        if paint(figure.add_subplot(), runs):
            figure.tight_layout()
            drawn.append(folder / f"{name}-{kind}.png")
            figure.savefig(drawn[-1], dpi=DPI)
    return drawn


def _label(measured: Measured) -> str:
    run = measured.run
    return f"{run.load.case.name} {run.server.split('//')[-1]} seed {run.seed}"


def _decorate_axes(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small")


def _itl_tail(axes: Axes, runs: list[Measured]) -> bool:
    """Share of gaps longer than a time."""
    for measured in runs[:MAX_RUNS]:
        gaps = sorted(gap for one in _completed(measured) for gap in one.gaps)
        # Gaps of 0 count in the total, but a logarithmic axis cannot show them.
        shown = [(gap * 1000, 1 - place / len(gaps)) for place, gap in enumerate(gaps) if gap > 0]
        if shown:
            axes.step(*zip(*shown, strict=True), where="pre", label=_label(measured))
    axes.set_xscale("log")
    axes.set_yscale("log")
    _decorate_axes(axes, "Gaps between chunks: the tail", "gap of at least, ms", "share of all gaps")
    return bool(axes.lines)


def _ttft_by_prompt(axes: Axes, runs: list[Measured]) -> bool:
    for measured in runs[:MAX_RUNS]:
        started = [one for one in _completed(measured) if one.ttft is not None]
        if started:
            times = [one.ttft * 1000 for one in started if one.ttft is not None]
            axes.scatter([one.num_prompt_tokens for one in started], times, s=12, alpha=0.6, label=_label(measured))
    _decorate_axes(axes, "Time to the first token by prompt length", "prompt tokens", "TTFT, ms")
    axes.set_ylim(bottom=0)
    return bool(axes.collections)


def _tokens(axes: Axes, runs: list[Measured]) -> bool:
    for measured in runs[:MAX_RUNS]:
        seconds = tokens_by_second(measured.run)
        if seconds:
            axes.step(range(len(seconds)), seconds, where="post", label=_label(measured))
    _decorate_axes(axes, "Generated tokens in each second", "seconds since the begin", "tokens/s")
    axes.set_ylim(bottom=0)
    return bool(axes.lines)


def _latency_by_load(axes: Axes, runs: list[Measured]) -> bool:
    """Latencies of the first server and seed, if it was measured at several rates or concurrencies."""
    from matplotlib.ticker import LogFormatter

    points = load_points(runs)
    for metric in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "e2e_p50"):
        pairs = [(point.load, v * 1000) for point in points if (v := value(point.measured, metric)) is not None]
        if pairs:
            axes.plot(*zip(*pairs, strict=True), marker="o", label=metric.replace("_", " "))
    if len(points) > 1:
        axes.axvline(knee(points).load, linestyle="--", color="grey", label=knee_words(points))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 1)))
    pace = runs[0].run.load.case.pace
    _decorate_axes(axes, "Latency against load", "streams" if isinstance(pace, ClosedLoop) else "requests/s", "ms")
    return len(points) > 1


def _pairs(axes: Axes, runs: list[Measured]) -> bool:
    """Each ratio to the first server: median, least and greatest of the seeds."""
    found = ratios(runs)
    if not found:
        return False
    kinds = list(dict.fromkeys((one.case, one.position) for one in found))
    width = 0.8 / len(kinds)
    for number, kind in enumerate(kinds):
        of_kind = {one.metric: one for one in found if (one.case, one.position) == kind}
        places = [place for place, metric in enumerate(METRICS) if metric in of_kind]
        own = [of_kind[METRICS[place]] for place in places]
        axes.bar(
            [place + number * width for place in places],
            [one.median for one in own],
            width,
            yerr=([one.median - one.low for one in own], [one.high - one.median for one in own]),
            capsize=2,
            label=f"{kind[0]}: {own[0].server} over {own[0].base}",
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(METRICS)), METRICS, rotation=40, ha="right", fontsize="x-small")
    _decorate_axes(axes, "Pairs: ratio to the first server", "", "ratio (bar: median; line: least to greatest seed)")
    return True


def _completed(measured: Measured) -> Iterator[Timed]:
    return (timed_request(measured.run, one) for one in measured.run.outcomes if one.failure is None)


_PLOTS: dict[str, Callable[[Axes, list[Measured]], bool]] = {
    "itl-tail": _itl_tail,
    "ttft-by-prompt": _ttft_by_prompt,
    "tokens-over-time": _tokens,
    "latency-by-load": _latency_by_load,
    "pairs": _pairs,
}
"""The function behind each plot; it returns False if these runs have no data for it."""
