"""Pictures of evaluations: SVG that takes the colour of the text around it, so that it is right in
light and dark, with a value to read at every point. Files are written atomically.

matplotlib is optional: without it there are no pictures, and a warning.
"""

import colorsys
import contextlib
import io
import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from absl import logging

from ttcd_jax import units
from ttcd_jax.files import write_whole

TEXT = "#1f2328"  # in an SVG the colour of the text around it
# A method has one colour in the whole project, by its label: Okabe and Ito's, distinct in every
# common form of colour blindness, then Tol's. Markers differ too, for print.
COLOURS = {
    "IP-TTCD": "#0072B2",
    "SWA": "#D55E00",
    "full attention": TEXT,
    "IP-TTCD of the stream": "#009E73",
    "ideal IP-TTCD": "#56B4E9",
    "IP-TTT": "#E69F00",
    "LaCT": "#CC79A7",
    "DeltaNet": "#999933",
    "Gated DeltaNet": "#882255",
    "SWA + DeltaNet": "#AA4499",
    "SWA + Gated DeltaNet": "#44AA99",
}
# Of methods outside of the package.
_OTHERS = ["#6A5ACD", "#B8860B", "#A0522D", "#708090", "#2E8B57", "#C71585", "#4682B4"]
MARKERS = "osD^vPX"
# Of the runs of one method, and of what has no method: turns of the hue, factors of the lightness.
_SHADES = ((0, 1), (0.03, 1.6), (-0.05, 0.65), (-0.08, 1.3), (0.05, 0.65), (0, 1.8))
_OFF = re.compile(r"(, )?(memory off|off \(eta = 0\)|memory published)$")
_ON = re.compile(r"(, )?(memory on|fast weights on|memory kept)$")
_STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "font.size": 10,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), TEXT),
    **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor", "grid.color"), TEXT),
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.15,
    **dict.fromkeys(("figure.constrained_layout.w_pad", "figure.constrained_layout.h_pad"), 0.1),
    "svg.fonttype": "none",
    "svg.hashsalt": "ttcd_jax",
}
_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_ALONE = (  # of a file that is shown by itself
    "svg:root { color-scheme: light dark; color: #24292f; font-family: system-ui, sans-serif }"
    "@media (prefers-color-scheme: dark) { svg:root { color: #e6e8ea; filter: brightness(1.25) } }"
    "svg * { stroke-linejoin: round }"
)
SIZE = (5.6, 3.5)  # inches; a telephone shows it at nine tenths
_DPI = 200  # of a PNG
MAX_MARKED_POINTS = 40
MAX_LABELLED_BARS = 12
MAX_LETTERS = 45  # of level names along the x axis
_LABEL_WIDTH = 17  # letters at the end of a line
_LEGEND_WIDTH = 70  # letters of a line of the legend


class Picture(NamedTuple):
    """A picture, and the sentence that says what it shows."""

    path: Path  # relative to its folder
    sentence: str


class Look(NamedTuple):
    """The colour and marker of a run; dashed, and of bars an opacity, where its memory is off."""

    colour: str
    marker: str
    dashes: str
    opacity: float


_RUNS: ContextVar[Mapping[str, str] | None] = ContextVar("_RUNS", default=None)


@contextlib.contextmanager
def coloured_by_run(methods: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Inside, all series of a run have one colour in every picture, that of its method (`methods`:
    labels of methods by run) in a shade of its own; the name of a series is that of its run, or
    begins with it and a comma. Gives the colours."""
    token = _RUNS.set(dict(methods))
    try:
        yield {name: look.colour for name, look in zip(methods, looks([*methods]), strict=True)}
    finally:
        _RUNS.reset(token)


def looks(names: Sequence[str]) -> list[Look]:
    """The look of every series of a picture: solid with the memory on, dashed with it off."""
    runs, stems = _RUNS.get() or {}, [stem_of(name) for name in names]
    of_method, variants, found = Counter[str](), Counter[str](), {}
    for stem in dict.fromkeys([*runs, *stems]):
        owners = [run for run in runs if f"{stem}, ".startswith(f"{run}, ")]
        owner = max(owners, key=len, default=stem)
        if owner not in found:
            method, other = _method(runs.get(owner, owner)), len(of_method)
            colour = COLOURS.get(method) or _OTHERS[other % len(_OTHERS)]
            found[owner] = Look(_shade(colour, of_method[method]), MARKERS[len(found) % 7], "-", 1)
            of_method[method] += 1
        else:
            variants[owner] += 1
            dashes = (":", "-.")[variants[owner] % 2 - 1]
            found[stem] = found[owner]._replace(dashes=dashes, opacity=0.6)
    off = {"dashes": "--", "opacity": 0.3}
    pairs = zip(names, stems, strict=True)
    return [found[x]._replace(**off) if is_off(name) else found[x] for name, x in pairs]


def is_off(name: str) -> bool:
    """Whether a series is of a model with its memory off."""
    return _OFF.search(name) is not None


def stem_of(name: str) -> str:
    """The name of a series without the words for its memory, on or off."""
    return _ON.sub("", _OFF.sub("", name)) or name


def _method(text: str) -> str:
    """The longest label of a method that `text` begins with, else `text`."""
    labels = (x for x in COLOURS if re.match(rf"{re.escape(x)}(?!\w)", text))
    return max(labels, key=len, default=text)


def _shade(colour: str, number: int) -> str:
    turn, factor = _SHADES[number % len(_SHADES)]
    if not number % len(_SHADES):
        return colour
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    hue, light, saturation = colorsys.rgb_to_hls(red, green, blue)
    light = min(max(light * factor, 0.28), 0.56)
    parts = colorsys.hls_to_rgb((hue + turn) % 1, light, saturation)
    return "#" + "".join(f"{round(255 * x):02x}" for x in parts)


def plot_lines(
    path: Path,
    *,
    series: Mapping[str, tuple[Sequence[Any], Sequence[float | None]]],
    bands: Mapping[str, Sequence[Sequence[float]]] | None = None,
    is_log: bool = True,
    **labels: Any,
) -> None:
    """A line of (x, y) per series over a logarithmic x axis; ticks at powers of two, as 4K for
    4096, and nowhere else if all values are; names as x are at equal distances; None leaves a gap.
    Without `is_log` the axis is linear, in whole numbers, as for the steps of training.
    Names stand at the ends of the lines where they have room, else in a legend. `bands`: (low,
    high) of series; `labels`: of `_save_picture`."""

    def draw(axes: Any, titles: dict[str, Any]) -> None:
        ends = {}
        for look, (name, (x, y)) in zip(looks([*series]), series.items(), strict=True):
            marker = look.marker if len(x) <= MAX_MARKED_POINTS else ""
            style = {"color": look.colour, "linestyle": look.dashes, "marker": marker}
            heights = [math.nan if value is None else value for value in y]
            (line,) = axes.plot(x, heights, markersize=4.5, linewidth=1.6, label=name, **style)
            line.set_gid(f"titled-{len(titles)}")
            shown = [(a, b) for a, b in zip(x, heights, strict=True) if math.isfinite(b)]
            at = [(f"{a:,}" if isinstance(a, int) else str(a), b) for a, b in shown]
            titles[line.get_gid()] = name, [f"{name}\n{a}: {b:.4g}" for a, b in at]
            if shown:
                ends[name] = shown[-1][1], look.colour
            if bands and name in bands:
                axes.fill_between(x, *bands[name], color=look.colour, alpha=0.15, linewidth=0)
        _name_lines(axes, ends, labels.get("chance"))
        if not is_log:
            axes.locator_params("x", integer=True)
            axes.xaxis.set_major_formatter("{x:,.0f}")
            return
        shown = (point for x, y in series.values() for point in zip(x, y, strict=True))
        ticks = {x for x, y in shown if y is not None}
        if any(isinstance(x, str) for x in ticks):
            slant = sum(map(len, ticks)) > MAX_LETTERS
            axes.tick_params("x", rotation=25 if slant else 0)
            return
        if max(ticks, default=0) <= 0:
            return  # no point that a logarithmic axis can show
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: units.count(int(x)))
        axes.minorticks_off()
        if all(tick >= 1 and math.log2(tick).is_integer() for tick in ticks):
            axes.set_xticks(sorted(ticks))

    _save_picture(path, draw, **labels)


def _name_lines(axes: Any, ends: Mapping[str, tuple[float, str]], chance: float | None) -> None:
    """Writes the names at the ends of the lines, moved apart, instead of a legend, if all fit."""
    low, high = axes.get_ylim()
    if chance is not None:
        low, high = min(low, chance - 0.02 * (high - low)), max(high, chance)
    texts = {name: textwrap.fill(_short(name), _LABEL_WIDTH) for name in ends}
    heights = {name: 0.062 * (text.count("\n") + 1) for name, text in texts.items()}
    if len(ends) < 2 or sum(heights.values()) > 1:
        return
    axes.set_ylim(low, high)
    top = math.inf
    places = {}
    for name in sorted(ends, key=lambda name: -ends[name][0]):  # from above
        wanted = (ends[name][0] - low) / (high - low) + heights[name] / 2
        places[name] = top = min(wanted, top, 1.04)
        top -= heights[name]
    floor = 0.0
    for name in reversed(places):  # what is below the axis goes up again
        places[name] = max(places[name], floor + heights[name])
        floor = places[name]
    for name, place in places.items():
        where = {"xy": (1.015, place), "xycoords": "axes fraction", "va": "top"}
        look = {"color": ends[name][1], "fontsize": 9, "annotation_clip": False}
        axes.annotate(texts[name], linespacing=1.05, **where, **look)
    for line in axes.lines:
        line.set_label(f"_{line.get_label()}")


def _short(name: str) -> str:
    stem = stem_of(name)
    return f"{stem}, off" if is_off(name) and stem != name else stem


def plot_bars(
    path: Path,
    *,
    series: Mapping[str, Mapping[Any, float | None]],
    **labels: Any,
) -> None:
    """A bar per series in every group, n/a where it has none; `series`: heights by group; `labels`:
    of `_save_picture`."""
    groups = [*dict.fromkeys(itertools.chain(*series.values()))]

    def draw(axes: Any, titles: dict[str, Any]) -> None:
        width = 0.8 / max(len(series), 1)
        shown = zip(looks([*series]), series.items(), strict=True)
        for index, (look, (name, by_group)) in enumerate(shown):
            values = [*map(by_group.get, groups)]
            places = [group - 0.4 + (index + 0.5) * width for group in range(len(groups))]
            fill = f"{look.colour}{round(255 * look.opacity):02x}"
            style = {"color": fill, "edgecolor": look.colour, "linestyle": look.dashes}
            heights = [value or 0 for value in values]
            bars = axes.bar(places, heights, 0.88 * width, label=name, **style)
            numbers = "{:.3g}" if len(series) * len(groups) <= MAX_LABELLED_BARS else ""
            texts = ["n/a" if value is None else numbers.format(value) for value in values]
            axes.bar_label(bars, texts, padding=2, fontsize=8.5, zorder=3)
            for bar, group, value in zip(bars, groups, values, strict=True):
                bar.set_gid(f"titled-{len(titles)}")
                text = "n/a" if value is None else f"{value:.4g}"
                titles[bar.get_gid()] = f"{name}\n{group}: {text}", []
        names = [textwrap.fill(str(group), 18) for group in groups]
        slant = {"rotation": 25, "ha": "right"} if sum(map(len, names)) > MAX_LETTERS else {}
        axes.set_xticks(range(len(names)), names, **slant)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.12)

    _save_picture(path, draw, **labels)


def _save_picture(
    path: Path,
    draw: Callable[[Any, dict[str, Any]], None],
    *,
    title: str,
    x_label: str,
    y_label: str,
    chance: float | None = None,
) -> None:
    """A picture of one panel, higher by every line of legend, with a dotted line at `chance`."""
    titles: dict[str, Any] = {}

    def fill(figure: Any) -> None:
        axes = figure.subplots()
        draw(axes, titles)
        handles, labels = axes.get_legend_handles_labels()
        if chance is not None:
            handles.append(axes.axhline(chance, color=TEXT, linestyle=":", linewidth=1))
            labels.append("chance")
        axes.set(title=textwrap.fill(title, 54), xlabel=x_label, ylabel=y_label)
        if len(labels) > (chance is None):
            columns = max(1, min(len(labels), 62 // (max(map(len, labels)) + 6)))
            look = {"ncols": columns, "frameon": False, "fontsize": 9}
            labels = [textwrap.fill(label, _LEGEND_WIDTH) for label in labels]
            figure.legend(handles, labels, loc="outside lower center", **look)
            lines = -(-sum(label.count("\n") + 1 for label in labels) // columns)
            figure.set_figheight(figure.get_figheight() + 0.2 * (lines - 1))

    save_figure(path, fill, size=SIZE, titles=titles)


def save_figure(
    path: Path,
    draw: Callable[[Any], None],
    *,
    size: tuple[float, float],
    titles: Mapping[str, tuple[str, Sequence[str]]] | None = None,
) -> None:
    """An SVG, or by the name of the file a PNG, of the figure of `size` inches that `draw` fills.
    `titles`, of parts by their gid: what a browser shows of a part, and of each of its markers.
    Without matplotlib there is none, not even an older one, and a warning."""
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
        if path.suffix == ".png":
            figure.savefig(content, format="png", dpi=_DPI)
        else:
            figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    found = content.getvalue()
    write_whole(path, found if path.suffix == ".png" else _plain_svg(found, titles or {}))


def _plain_svg(content: bytes, titles: Mapping[str, tuple[str, Sequence[str]]]) -> str:
    """matplotlib's SVG without metadata, fonts and names, with `titles`, in the text's colour."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _LINK)
    root = ElementTree.fromstring(content)
    for node in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(node)
    for node in root.iter(f"{{{_SVG}}}style"):
        node.text = _ALONE
    parents = {child: node for node in root.iter() for child in node}
    for node in [*root.iter(f"{{{_SVG}}}g")]:
        whole, parts = titles.get(node.attrib.pop("id", ""), ("", ()))
        markers = list(node.iter(f"{{{_SVG}}}use"))
        if whole:
            node.insert(0, _title(whole))
        for marker, text in zip(markers, parts, strict=False):  # lines without markers have parts
            index = [*parents[marker]].index(marker)
            parents[marker][index] = group = ElementTree.Element(f"{{{_SVG}}}g")
            group.extend([_title(text), marker])
    text = ElementTree.tostring(root, encoding="unicode")
    text = re.sub(r"font-family: '[^;\"]*;? ?", "", text)
    return text.replace(TEXT, "currentColor")


def _title(text: str) -> ElementTree.Element:
    node = ElementTree.Element(f"{{{_SVG}}}title")
    node.text = text
    return node
