"""Bytes against accuracy, drawn from the rows of a run: `python -m gnnsys.bench.samplers.curve ROWS.json OUT.svg`.

Two panels: test accuracy with whole rows, and with rows of other parts as trainers read them. SVG is written here,
without any library: no background, and colours that follow the reader's light or dark setting.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

# What each line joins, from most bytes to least, and its colour and dashes.
LINES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "uniform, smaller fanouts": (
        ("uniform", "uniform, 3/4 of the fanout", "uniform, 5/8 of the fanout", "uniform, half the fanout"), "#6e7781",
        "",
    ),
    "LABOR": (("labor", "labor, 3/4 of the fanout"), "#bf8700", ""),
    "explained columns": (("uniform", "columns", "columns, half"), "#2f81f7", ""),
    "random columns": (("uniform", "random columns", "random columns, half"), "#2f81f7", "4 3"),
    "explained nodes and columns": (("nodes", "both", "both, half"), "#d1242f", ""),
    "local first, random columns": (
        ("nodes at random", "local first, random columns", "local first, random columns, half"), "#d1242f", "4 3",
    ),
}  # fmt: skip
PANELS = {"accuracy": "with whole rows", "as read": "with rows as trainers read them"}

_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #24292f }
.title { font-size: 14px; font-weight: 600 }
.faint { fill: #6e7781 }
.axis { stroke: #6e7781; stroke-width: 1 }
.grid { stroke: #6e7781; stroke-width: 1; stroke-opacity: 0.2 }
.curve { fill: none; stroke-width: 2 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .faint { fill: #9198a1 } }
"""
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 360, 260, 50, 60, 60
_LEGEND = 16  # pixels per line


class CurvePoint(NamedTuple):
    megabytes: float
    percent: float
    spread: float


def read_points(report: Mapping[str, object], prefix: str, figure: str) -> dict[str, CurvePoint]:
    """The variants of a report's rows "prefix/NAME/...", with what stood beside them."""
    found: dict[str, dict[str, float]] = {}
    rows: Sequence[Mapping[str, float | str | None]] = report["rows"]  # type: ignore[assignment]
    for row in rows:
        first, _, rest = str(row["name"]).partition("/")
        name, _, label = rest.rpartition("/")
        if first == prefix and label in ("remote", "spread", figure):
            for which, side in ((name, "ours"), (str(row["peer_name"]), "peer")):
                if row[side] is not None:
                    found.setdefault(which, {})[label] = float(row[side])  # type: ignore[arg-type]
    return {
        name: CurvePoint(values["remote"], values[figure], values["spread"])
        for name, values in found.items()
        if len(values) == 3
    }


def draw(report: Mapping[str, object], prefix: str = "wide") -> str:
    """The picture as SVG text. ValueError where the report has no such rows."""
    panels = {figure: read_points(report, prefix, figure) for figure in PANELS}
    names = {name for line, _, _ in LINES.values() for name in line}
    points = [point for found in panels.values() for name, point in found.items() if name in names]
    if not points:
        raise ValueError(f"no rows {prefix}/NAME/remote, accuracy, as read and spread: run gnnsys bench samplers first")
    most = _ceiling(max(point.megabytes for point in points))
    low = math.floor(min(point.percent - point.spread for point in points))
    high = math.ceil(max(point.percent + point.spread for point in points))
    out = [f'<text x="10" y="20" class="title">{escape("Remote megabytes of an epoch and test accuracy")}</text>']
    for number, (figure, title) in enumerate(PANELS.items()):
        left = _LEFT + number * (_WIDTH + _GAP)
        out += _axes(left, title, most, low, high)
        for name, (line, colour, dashes) in LINES.items():
            chosen = [(each, panels[figure][each]) for each in line if each in panels[figure]]
            at = [_place(point, left, most, low, high) for _, point in chosen]
            out += _curve(name, chosen, at, colour, dashes)
    out += _legend()
    width, height = _LEFT + 2 * _WIDTH + _GAP + 20, _TOP + _HEIGHT + 50 + _LEGEND * math.ceil(len(LINES) / 3)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *out, "</svg>", ""])


def _ceiling(megabytes: float) -> float:
    step = 10 ** math.floor(math.log10(megabytes)) / 2
    return math.ceil(megabytes / step) * step


def _place(point: CurvePoint, left: float, most: float, low: float, high: float) -> tuple[float, float, float]:
    """x, y, and the pixels of one spread."""
    scale = _HEIGHT / (high - low)
    return left + _WIDTH * point.megabytes / most, _TOP + (high - point.percent) * scale, point.spread * scale


def _axes(left: float, title: str, most: float, low: float, high: float) -> list[str]:
    bottom = _TOP + _HEIGHT
    out = [_text(left, _TOP - 18, title, "faint")]
    step = max(1, round((high - low) / 8))
    for percent in range(math.ceil(low), math.floor(high) + 1, step):
        y = _TOP + (high - percent) * _HEIGHT / (high - low)
        out.append(f'<line class="grid" x1="{left}" x2="{left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>')
        out.append(_text(left - 6, y + 4, f"{percent}%", "faint", "end"))
    for number in range(6):
        x = left + number * _WIDTH / 5
        out.append(_text(x, bottom + 16, f"{most * number / 5:g}", "faint", "middle"))
    out.append(f'<line class="axis" x1="{left}" x2="{left + _WIDTH}" y1="{bottom}" y2="{bottom}"/>')
    out.append(_text(left + _WIDTH, bottom + 30, "MB", "faint", "end"))
    return out


def _curve(
    name: str,
    chosen: Sequence[tuple[str, CurvePoint]],
    at: Sequence[tuple[float, float, float]],
    colour: str,
    dashes: str,
) -> list[str]:
    style = f'stroke="{colour}"' + (f' stroke-dasharray="{dashes}"' if dashes else "")
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in at)
    out = [f'<polyline class="curve" points="{path}" {style}><title>{escape(name)}</title></polyline>']
    for (which, point), (x, y, spread) in zip(chosen, at, strict=True):
        tip = f"{which}: {point.megabytes:.0f} MB, {point.percent:.1f}%, spread {point.spread:.1f}"
        out.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - spread:.1f}" y2="{y + spread:.1f}" stroke="{colour}"/>')
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{escape(tip)}</title></circle>')
    return out


def _legend() -> list[str]:
    out = []
    for number, (name, (_, colour, dashes)) in enumerate(LINES.items()):
        x, y = _LEFT + 250 * (number % 3), _TOP + _HEIGHT + 46 + _LEGEND * (number // 3)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        out.append(
            f'<line x1="{x}" x2="{x + 24}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="2"{dashed}/>'
        )
        out.append(_text(x + 30, y, name))
    return out


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{named} text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m gnnsys.bench.samplers.curve ROWS.json OUT.svg")
    Path(sys.argv[2]).write_text(draw(json.loads(Path(sys.argv[1]).read_text())), encoding="utf-8")
