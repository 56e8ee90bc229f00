"""Pictures of evaluations. Files are written atomically.

matplotlib is optional: without it there are no pictures, and a warning.
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from absl import logging

from ttcd_jax import units
from ttcd_jax.files import write_whole

# Okabe and Ito's colours, distinct in every common form of colour blindness, without yellow,
# which is too pale for a line on white. Markers differ too, for print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = "osD^vPX"
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    **dict.fromkeys(("figure.constrained_layout.w_pad", "figure.constrained_layout.h_pad"), 0.12),
}
MAX_MARKED_POINTS = 40
MAX_LABELLED_BARS = 24


class Picture(NamedTuple):
    """A picture, and the sentence that says what it shows."""

    path: Path  # relative to its folder
    sentence: str


class Look(NamedTuple):
    """The colour and marker of a run, and the dashes and hatches of its variants."""

    colour: str
    marker: str
    dashes: str
    hatch: str


_RUNS: ContextVar[tuple[str, ...]] = ContextVar("_RUNS", default=())
_DASHES, _HATCHES = ("-", "--", ":", "-."), ("", "///", "...", "xxx")


@contextlib.contextmanager
def coloured_by_run(labels: Sequence[str]) -> Iterator[dict[str, str]]:
    """Inside, all series of a run have one colour in every picture, and its variants other dashes;
    the name of a series is that of its run, or begins with it and a comma. Gives the colours."""
    token = _RUNS.set(tuple(labels))
    try:
        yield {label: look.colour for label, look in zip(labels, looks(labels), strict=True)}
    finally:
        _RUNS.reset(token)


def looks(names: Sequence[str]) -> list[Look]:
    """The look of every series of a picture."""
    runs, seen, result = [*_RUNS.get()], {}, []
    for name in names:
        owners = [run for run in runs if name == run or name.startswith(f"{run}, ")]
        run = max(owners, key=len, default=name)
        if run not in runs:
            runs.append(run)
        index, variant = runs.index(run), seen.get(run, 0)
        seen[run] = variant + 1
        whose = [x[index % len(x)] for x in (COLOURS, MARKERS)]
        result.append(Look(*whose, *(x[variant % len(x)] for x in (_DASHES, _HATCHES))))
    return result


def plot_lines(
    path: Path,
    *,
    series: Mapping[str, tuple[Sequence[Any], Sequence[float | None]]],
    bands: Mapping[str, Sequence[Sequence[float]]] | None = None,
    **labels: Any,
) -> None:
    """A PNG with a line of (x, y) per series over a logarithmic x axis; ticks at powers of two, as
    4K for 4096, and nowhere else if all values are; names as x are at equal distances; None leaves
    a gap. `bands`: (low, high) of series; `labels`: of `_save_picture`."""

    def draw(axes: Any) -> None:
        for look, (name, (x, y)) in zip(looks([*series]), series.items(), strict=True):
            marker = look.marker if len(x) <= MAX_MARKED_POINTS else ""
            style = {"color": look.colour, "linestyle": look.dashes, "marker": marker}
            heights = [math.nan if value is None else value for value in y]
            axes.plot(x, heights, markersize=5, label=name, **style)
            if bands and name in bands:
                axes.fill_between(x, *bands[name], color=look.colour, alpha=0.15, linewidth=0)
        shown = (point for x, y in series.values() for point in zip(x, y, strict=True))
        ticks = {x for x, y in shown if y is not None}
        if any(isinstance(x, str) for x in ticks) or max(ticks, default=0) <= 0:
            return  # names, or no point that a logarithmic axis can show
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: units.count(int(x)))
        axes.minorticks_off()
        if all(tick >= 1 and math.log2(tick).is_integer() for tick in ticks):
            axes.set_xticks(sorted(ticks))

    _save_picture(path, draw, **labels)


def plot_bars(
    path: Path,
    *,
    groups: Sequence[Any],
    series: Mapping[str, Sequence[float | None]],
    **labels: Any,
) -> None:
    """A PNG with a bar per series in every group, n/a for None; `labels`: of `_save_picture`."""

    def draw(axes: Any) -> None:
        width = 0.8 / max(len(series), 1)
        shown = zip(looks([*series]), series.items(), strict=True)
        for index, (look, (name, values)) in enumerate(shown):
            places = [group - 0.4 + (index + 0.5) * width for group in range(len(groups))]
            style = {"color": look.colour, "hatch": look.hatch, "edgecolor": "white"}
            heights = [value or 0 for value in values]
            bars = axes.bar(places, heights, 0.92 * width, label=name, **style)
            numbers = "{:.3g}" if len(series) * len(groups) <= MAX_LABELLED_BARS else ""
            texts = ["n/a" if value is None else numbers.format(value) for value in values]
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
            axes.bar_label(bars, texts, padding=3, fontsize=9, bbox=box, zorder=3)
        names = [str(group) for group in groups]
        slant = {"rotation": 25, "ha": "right"} if sum(map(len, names)) > 70 else {}
        axes.set_xticks(range(len(names)), names, **slant)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.12)

    _save_picture(path, draw, **labels)


def _save_picture(
    path: Path,
    draw: Callable[[Any], None],
    *,
    title: str,
    x_label: str,
    y_label: str,
    chance: float | None = None,
) -> None:
    """A picture of one panel, 1600 x 900 pixels, higher under more than three lines of legend;
    legible at half its size; with a dashed line at `chance`."""

    def fill(figure: Any) -> None:
        axes = figure.subplots()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if chance is not None:
            handles.append(axes.axhline(chance, color="#555555", linestyle="--"))
            labels.append("chance")
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        if len(labels) > 1:
            columns = max(1, min(len(labels), 90 // (max(map(len, labels)) + 6)))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
            lines_below = -(-len(labels) // columns) - 3
            figure.set_figheight(figure.get_figheight() + 0.25 * max(0, lines_below))

    save_figure(path, fill, size=(8, 4.5), dpi=200)


def save_figure(
    path: Path, draw: Callable[[Any], None], *, size: tuple[float, float], dpi: int
) -> None:
    """A PNG of the figure of `size` inches that `draw` fills; without matplotlib none, not even an
    older one, and a warning."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        path.unlink(missing_ok=True)
        message = "no pictures: matplotlib is missing, install ttcd_jax[report]"
        logging.log_first_n(logging.WARNING, message, 1)
        return
    # A bare Figure draws with Agg and keeps no global state, unlike pyplot.
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=dpi)
    write_whole(path, content.getvalue())
