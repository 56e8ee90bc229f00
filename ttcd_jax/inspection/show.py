"""Pictures of an inspection: HTML and SVG of their own, in light and dark, without a script.

All text is escaped. Blue: the memory helped, or a number is great; orange: it harmed. How much is
the opacity of a colour, and the number its title.
"""

import functools
import html
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from ttcd_kernels.table import Row, cells

from ttcd_jax.errors import UserError

BLUE, ORANGE = "#0072B2", "#D55E00"  # Okabe and Ito's
MOST_COLUMNS, WIDTH, LEFT = 128, 800, 150  # of a heat map, in pixels
_STYLE = """<style>
.seen { font: 15px/1.6 system-ui, sans-serif; }
.seen pre { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 30rem; overflow-y: auto;
  font: 13px/1.7 ui-monospace, Menlo, Consolas, monospace; }
.seen span { print-color-adjust: exact; -webkit-print-color-adjust: exact; }
.seen div { overflow-x: auto; }
.seen svg { display: block; width: 100%; max-width: 860px; height: auto; }
.seen .wide { min-width: 640px; }
.seen text { fill: currentColor; font-size: 11px; }
.seen td, .seen th { padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top; }
@media (max-width: 600px) { .seen svg:not(.wide) text { font-size: 20px; } }
@media print {
  .seen pre { max-height: none; }
  .seen .wide { min-width: 0; }
  .seen p { break-after: avoid; }
  .seen svg { break-inside: avoid; }
}
</style>"""


class Shown(NamedTuple):
    """A picture of an inspection; a notebook displays it."""

    html: str

    def _repr_html_(self) -> str:
        return page_part(self.html)


def page_part(*parts: str) -> str:
    return f'{_STYLE}<div class="seen">{"".join(parts)}</div>'


def view(seen: Any, what: str, **options: Any) -> Shown:
    """The picture `what` of an `Inspection`. Raises `UserError` for another one, `TypeError` for
    options that it has not."""
    text = dict.fromkeys(("gain", "gate", "write"), functools.partial(_text, what=what))
    views: dict[str, Any] = text | {"loudness": _loudness, "reads": _reads}
    if what not in views:
        raise UserError(f"nothing to show by the name {what!r}: there are {', '.join(views)}")
    return Shown(views[what](seen, **options))


def rows_of(rows: Sequence[Row]) -> str:
    header, body = cells(rows)
    lines = [("th", [name for name, _ in header]), *(("td", row) for row in body)]
    texts = ("".join(f"<{x}>{html.escape(cell)}</{x}>" for cell in line) for x, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in texts)}</table>"


def answer(found: Any) -> str:
    rows = found.table()
    line = f"Token {found.token} was predicted at token {found.query}, which read"
    return f"<p>{line}:</p>{rows_of(rows)}" if rows else f"<p>{line} nothing.</p>"


def _text(seen: Any, what: str, layer: int | None = None) -> str:
    """The text, a background for every token; the most opaque is the 99th percentile."""
    layer = seen.layers[0] if layer is None else layer
    seen.memory(layer)
    if what == "gain":
        values = np.nan_to_num(seen.gain)
        caption = (
            "Gain of every token, loss with the memories off less on: blue they helped, orange "
            f"they harmed. Mean {np.nanmean(seen.gain):.3f} nats, sum {values.sum():.1f}."
        )
    else:
        values = (seen.gate if what == "gate" else seen.write_norm)[seen.layers.index(layer)]
        name = {"gate": "Gate of every token", "write": "Norm of what every token wrote"}[what]
        caption = f"{name} in layer {layer}: mean {values.mean():.3g}, most {values.max():.3g}."
    scale = 1.0 if what == "gate" else float(np.percentile(np.abs(values), 99)) or 1.0
    spans = (
        f'<span style="background:{_colour(x / scale)}" title="{what} {x:.3g}">'
        f"{html.escape(text)}</span>"
        for text, x in zip(seen.texts, values.tolist(), strict=True)
    )
    return f"<p>{caption}</p><pre>{''.join(spans)}</pre>"


def _loudness(seen: Any) -> str:
    values, height, marks = seen.loudness, 240, []
    top, x = float(values.max()) or 1.0, np.linspace(50, WIDTH - 100, values.shape[1])
    opacities = np.linspace(1, 0.4, len(values))
    lines = height - 30 - (height - 50) * values / top
    for layer, line, opacity in zip(seen.layers, lines, opacities, strict=True):
        points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, line, strict=True))
        style = f'fill="none" stroke="{BLUE}" stroke-width="2" opacity="{opacity:.2f}"'
        marks += [f'<polyline points="{points}" {style}/>']
        marks += [_label(WIDTH - 94, line[-1] + 4, f"layer {layer}", "start")]
    marks += [_label(44, 24, f"{top:.3g}"), _label(44, height - 30, "0")]
    marks += [_label(WIDTH - 100, height - 8, f"{len(seen.tokens):,} tokens")]
    return _svg(height, "Loudness |eta S| / |W_base| before every chunk, along the row.", marks)


def _reads(seen: Any, layer: int | None = None, queries: Any = None) -> str:
    """A heat map: reads from top to bottom, writes from left to right, adjacent ones together."""
    layer, count = seen.layers[0] if layer is None else layer, len(seen.tokens)
    found, per = seen.reads(queries, [layer]), math.ceil(count / MOST_COLUMNS)
    edges = np.arange(0, count, per)
    shares = np.add.reduceat(found.share[0], edges, axis=1)
    step, tall = (WIDTH - LEFT - 10) / len(edges), max(min(14, 720 / max(len(shares), 1)), 3)
    marks = []
    for row, query in enumerate(found.queries.tolist()):
        y = 10 + row * tall
        if tall >= 11:
            text = "".join(seen.texts[max(query - 7, 0) : query + 1])[-14:]
            marks += [_label(LEFT - 6, y + tall - 3, f"{text!r} {query}")]
        for column in np.flatnonzero(np.abs(shares[row]) > 0.005).tolist():
            value, start = float(shares[row, column]), edges[column]
            title = f"token {query}: {value:.3f} from {start} .. {min(start + per, count) - 1}"
            fill = f'fill="{_colour(math.copysign(math.sqrt(abs(value)), value))}"'
            box = _box(LEFT + column * step, y, step, tall)
            marks += [f"<rect {box} {fill}><title>{title}</title></rect>"]
    bottom = 10 + len(shares) * tall
    frame = _box(LEFT, 10, WIDTH - LEFT - 10, bottom - 10)
    marks += [f'<rect {frame} fill="none" stroke="currentColor" opacity=".4"/>']
    marks += [_label(LEFT, bottom + 16, "written at token 0", "start")]
    marks += [_label(WIDTH - 10, bottom + 16, f"{count - 1:,}")]
    caption = (
        f"Who wrote what tokens read in layer {layer}: a line is a read, a column {per} tokens "
        "that wrote. Blue: in its direction, orange: against it; a line adds up to 1, and a "
        "quarter has half the colour."
    )
    return _svg(bottom + 24, caption, marks, "wide")


def _box(x: float, y: float, width: float, height: float) -> str:
    return f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'


def _label(x: float, y: float, text: str, anchor: str = "end") -> str:
    return f'<text x="{x:.0f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _svg(height: float, caption: str, marks: Sequence[str], kind: str = "") -> str:
    """`kind` "wide": it keeps its width on a telephone, and scrolls there."""
    box = f'viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{html.escape(caption)}"'
    svg = f'<svg class="{kind}" {box}>{"".join(marks)}</svg>'
    return f"<p>{caption}</p><div>{svg}</div>"


def _colour(value: float) -> str:
    share = round(75 * min(abs(value), 1.0))
    return f"color-mix(in srgb,{BLUE if value > 0 else ORANGE} {share}%,transparent)"
