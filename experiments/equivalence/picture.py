"""The picture of an equivalence: the distances of two ways, at every level that was compared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttcd_jax.eval.report import COLOURS, STYLE, save_figure

Facts = Mapping[str, Any]

# Name of a stacked part, the share that bounds it, its colour.
_PARTS = (
    ("equal", "equal_share", COLOURS[2]),
    ("1 ulp", "within_1_ulp", COLOURS[4]),
    ("2 ulp", "within_2_ulp", COLOURS[5]),
    ("more", None, COLOURS[1]),
)
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 9, "ncols": 4}
_LEGEND |= {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}


def draw_equivalence(path: Path, result: Facts) -> None:
    """A PNG of `equivalence.json`: histograms of KL and total variation, flips by position,
    distances in units in the last place by layer, scores by cell; a panel for each that was
    measured. Raises `UserError` without matplotlib.
    """
    grid = [["kl", "tv", "positions"]] if "distribution" in result else []
    lower = ["layers"] * 2 * ("kernel" in result) + ["cells"] * ("task" in result)
    if lower:
        grid.append((lower * 3)[:3] if len(set(lower)) == 1 else lower)

    def draw(figure: Any) -> None:
        panels = figure.subplot_mosaic(grid)
        if "distribution" in result:
            found = result["distribution"]
            _draw_histogram(panels["kl"], found["kl"], "KL(reference || candidate), nats")
            _draw_histogram(panels["tv"], found["tv"], "total variation")
            _draw_positions(panels["positions"], found)
        if "kernel" in result:
            _draw_layers(panels["layers"], result["kernel"])
        if "task" in result:
            _draw_cells(panels["cells"], result["task"]["cells"])
        ways = (f"{role}: {_named(result[role])}" for role in ("reference", "candidate"))
        figure.suptitle("\n".join(ways), x=0.01, ha="left", fontsize=11)

    style = STYLE | {"text.parse_math": True}  # powers of ten along the axes
    save_figure(path, draw, size=(15, 4.3 * len(grid) + 0.6), dpi=110, style=style)


def _named(way: Facts) -> str:
    piece = "" if way["piece_size"] is None else f" in pieces of {way['piece_size']:,} tokens"
    form = "" if way["form"] is None else f", memory {way['form']}"
    return f"{way['path']}{piece}, attention {way['attention']}{form}, {way['compute']}"


def _draw_histogram(axes: Any, found: Facts, label: str) -> None:
    """The share of positions in each bin; the share below the first edge is in the legend."""
    histogram = found["histogram"]
    edges, counts, below = (histogram[name] for name in ("edges", "counts", "below"))
    total = sum(counts) + below + histogram["above"]
    axes.stairs([100 * count / total for count in counts], edges, fill=True, color=COLOURS[0])
    for name, dash in (("50%", "--"), ("99%", ":")):
        if found[name] >= edges[0]:
            line = {"color": "#333333", "linestyle": dash, "label": f"{name}: {found[name]:.2g}"}
            axes.axvline(found[name], **line)
    if below:
        axes.plot([], linestyle="", label=f"below {edges[0]:.0e}: {100 * below / total:.3g} %")
    used = [index for index, count in enumerate(counts) if count] or [0, len(counts)]
    axes.set_xlim(edges[max(used[0] - 2, 0)], edges[min(used[-1] + 3, len(counts))])
    axes.set(xscale="log", xlabel=label, ylabel="share of positions, %")
    _finish(axes)


def _draw_positions(axes: Any, found: Facts) -> None:
    buckets = found["by_position"]
    shares = [100 * bucket["flip_share"] for bucket in buckets]
    names = [f"{bucket['start']}-{bucket['stop'] - 1}" for bucket in buckets]
    axes.bar(range(len(buckets)), shares, color=COLOURS[1])
    level = 100 * found["flip_share"]
    axes.axhline(level, color="#333333", linestyle="--", label=f"all positions: {level:.3g} %")
    axes.set_xticks(range(len(buckets)), names, rotation=40, ha="right", fontsize=9)
    axes.set(xlabel="position, tokens", ylabel="likeliest token differs, %")
    _finish(axes)


def _finish(axes: Any) -> None:
    """From zero up, also where everything is zero; the legend above."""
    axes.set_ylim(0, None if axes.dataLim.ymax > 0 else 1)
    axes.grid(visible=False, axis="x")
    axes.legend(**_LEGEND)


def _draw_layers(axes: Any, found: Facts) -> None:
    """Stacked shares by distance: of blocks, of attention alone, of the whole model."""
    rows = [(str(row["layer"]), row) for row in found["layers"] or []]
    rows += [(f"att. {row['layer']}", row) for row in found["attention"] or []]
    rows.append(("model", found["whole_model"]))
    bottoms = [0.0] * len(rows)
    for name, bound, colour in _PARTS:
        tops = [100 * row.get(bound, 1) for _, row in rows]
        heights = [top - bottom for top, bottom in zip(tops, bottoms, strict=True)]
        axes.bar(range(len(rows)), heights, bottom=bottoms, label=name, color=colour)
        bottoms = tops
    turned = {"rotation": 90, "fontsize": 9} if len(rows) > 12 else {}
    axes.set_xticks(range(len(rows)), [name for name, _ in rows], **turned)
    margin = max(0, 6 - len(rows)) / 2 + 0.6
    axes.set_xlim(-margin, len(rows) - 1 + margin)
    axes.set(
        xlabel="layers on the reference's input to them (att.: attention alone)",
        ylabel="share of outputs, %",
    )
    _finish(axes)


def _draw_cells(axes: Any, cells: list[Facts]) -> None:
    names = [f"{cell['task'].removeprefix('niah_')} at {cell['length']:,}" for cell in cells]
    parts = ("reference", "reference_score", 1), ("candidate", "candidate_score", 1)
    for index, (label, key, unit) in enumerate((*parts, ("same answer", "identical_share", 100))):
        heights = [position + 0.27 * (index - 1) for position in range(len(cells))]
        values = [unit * cell[key] for cell in cells]
        axes.barh(heights, values, 0.25, label=label, color=COLOURS[index])
    axes.set_yticks(range(len(cells)), names, fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="score, and samples with the same answer, %", xlim=(0, 100))
    axes.grid(visible=False, axis="y")
    axes.legend(**_LEGEND)
