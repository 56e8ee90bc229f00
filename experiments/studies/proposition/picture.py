"""The picture of Proposition 1: equality under orthogonal keys, and the effect of interference."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.studies.proposition.construction import Measured, PropositionConfig
from ttcd_jax.eval.report import COLOURS, MARKERS, STYLE, save_figure

_LEFT = r"left side  $y_{q_1}(T)\cdot\Delta y_{q_2}(S)$"
_RIGHT = r"right side  $(\eta/L)\;c_{\mathrm{gap}}\;c_{\mathrm{align}}$"
_COSINE = r"mean |cosine| of the other keys with $z_{q_2}(S)$"
_LINE = {"color": "#555555", "linewidth": 1}

Rows = Sequence[Mapping[str, Any]]


def draw_proposition(
    path: Path, config: PropositionConfig, orthogonal: Mapping[int, Measured], interference: Rows
) -> None:
    """A PNG of three panels: both sides of every orthogonal draw, by chunk size; the spread of
    left / right as keys overlap, by number of fillers, for `config`; the share below the bound.

    `interference`: rows of `ratio_summary` with their `fillers`. Raises `UserError` without
    matplotlib.
    """

    def draw(figure: Any) -> None:
        equality, spread, shares = figure.subplots(1, 3)
        _draw_equality(equality, config.eta, orthogonal)
        for index, fillers in enumerate(dict.fromkeys(row["fillers"] for row in interference)):
            rows = [row for row in interference if row["fillers"] == fillers]
            _draw_interference(spread, shares, rows, fillers, _look(index))
        spread.axhline(1, **_LINE)
        spread.axhline(0, linestyle=":", **_LINE)
        spread.set(
            title=f"Keys overlap (L = {config.chunk_size})",
            xlabel=f"{_COSINE}\nmedian, and band of 90 % of the draws",
            ylabel="left side / right side  (1: the bound)",
        )
        shares.set(
            title=f"The bound fails (L = {config.chunk_size})",
            xlabel=f"{_COSINE}\nsolid: left < right;  dashed: left < 0",
            ylabel="share of the draws (%)",
            ylim=(-3, 135),
            yticks=range(0, 101, 20),
        )
        title = "tokens between $q_1$ and $q_2$"
        shares.legend(frameon=False, loc="upper center", ncols=3, title=title)

    save_figure(path, draw, size=(15, 5.2), dpi=130, style=STYLE | {"text.parse_math": True})


def _look(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def _draw_equality(axes: Any, eta: float, orthogonal: Mapping[int, Measured]) -> None:
    for index, (chunk_size, drawn) in enumerate(orthogonal.items()):
        look = {"s": 24, "alpha": 0.6, "linewidths": 0, **_look(index)}
        axes.scatter(drawn.right, drawn.left, label=f"L = {chunk_size}", **look)
    low = min(drawn.right.min() for drawn in orthogonal.values())
    high = max(drawn.right.max() for drawn in orthogonal.values())
    axes.plot([low, high], [low, high], label="left = right", **_LINE)
    axes.set(
        title="All other keys orthogonal",
        xscale="log",
        yscale="log",
        xlabel=f"{_RIGHT}\na chunk of L tokens writes $\\eta$ = {eta:g} times its mean",
        ylabel=_LEFT,
    )
    axes.legend(frameon=False, loc="upper left")


def _draw_interference(
    spread: Any, shares: Any, rows: Rows, fillers: int, look: dict[str, Any]
) -> None:
    x = [row["key_cosine"] for row in rows]
    low, median, high = ([row[f"ratio_{part}%"] for row in rows] for part in (5, 50, 95))
    missed, reversed_ = ([100 * row[key] for row in rows] for key in ("below_bound", "below_0"))
    spread.fill_between(x, low, high, color=look["color"], alpha=0.18, linewidth=0)
    spread.plot(x, median, markersize=5, **look)
    shares.plot(x, missed, markersize=5, label=f"{fillers}", **look)
    shares.plot(x, reversed_, markersize=5, linestyle="--", **look)
