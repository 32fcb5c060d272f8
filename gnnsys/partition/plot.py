"""The part-to-part traffic matrix and the balance bars of an inspection, as a picture.

SVG is written here, without any library: no background, and colours that follow the reader's light or dark setting.
PNG needs matplotlib, which is no dependency.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from gnnsys.partition.inspect import Inspection
from gnnsys.partition.subpart_loads import Load

ENDINGS = (".svg", ".png")

_STYLE = """
text { font: 11px system-ui, sans-serif; fill: #24292f }
.title { font-size: 14px; font-weight: 600 }
.faint { fill: #6e7781 }
.cell, .bar { fill: #2f81f7 }
.over { fill: #d1242f }
.line { stroke: #6e7781; stroke-width: 1 }
.limit { stroke: #d1242f; stroke-width: 1; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .faint { fill: #9198a1 } .line { stroke: #9198a1 } }
"""
_CELL, _SMALL_CELL, _MOST_NUMBERED = 46, 12, 24  # pixels; parts up to which every cell has its number
_LEFT, _TOP, _GAP = 70, 76, 50
_BAR_HEIGHT, _LEAST_WIDTH = 70, 300  # the width of either half


def check_plot_file(file: str | os.PathLike[str]) -> Path:
    """The file; ValueError unless it can be drawn: a known ending, a folder that exists, matplotlib where needed."""
    path = Path(file)
    if path.suffix not in ENDINGS:
        raise ValueError(f"a plot must end in {' or '.join(ENDINGS)}, got {str(file)!r}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"plot {str(file)!r}: the folder {str(path.parent)!r} does not exist")
    if path.suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"a .png needs matplotlib, which is not installed: write {path.with_suffix('.svg')} instead")
    return path


def write_plot(inspection: Inspection, file: str | os.PathLike[str]) -> None:
    """Draws to `file`, as its ending says."""
    path = check_plot_file(file)
    if path.suffix == ".png":
        _write_png(inspection, path)
    else:
        path.write_text(svg(inspection), encoding="utf-8")


def svg(inspection: Inspection) -> str:
    """The picture as SVG text: rows sent from part (row) to part (column), then bars per constraint."""
    num_parts = len(inspection.parts)
    cell = _CELL if num_parts <= _MOST_NUMBERED else _SMALL_CELL
    matrix_width = max(_LEAST_WIDTH, _LEFT + cell * num_parts + 60)
    bars_width = max(_LEAST_WIDTH, 10 * len(inspection.parts) * inspection.trainers_per_part)
    bars_left = matrix_width + _GAP
    bars = [
        element
        for row, load in enumerate(inspection.loads)
        for element in _bars(load, bars_left, _TOP + row * (_BAR_HEIGHT + _GAP), bars_width)
    ]
    width = bars_left + bars_width + 20
    height = max(_TOP + cell * num_parts + 50, _TOP + len(inspection.loads) * (_BAR_HEIGHT + _GAP))
    titles = [*_title(10, "Traffic", "rows per layer, from part (row) to part (column)")]
    titles += _title(bars_left, "Balance", "every subpart to the average")
    elements = [*titles, *_matrix(inspection, cell), *bars]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return "\n".join([head, f"<style>{_STYLE}</style>", *elements, "</svg>", ""])


def _matrix(inspection: Inspection, cell: int) -> list[str]:
    num_parts, most = len(inspection.parts), max(max(map(max, inspection.traffic)), 1)
    numbered, every = cell == _CELL, max(1, num_parts // 16) if cell == _SMALL_CELL else 1
    out = []
    for p, row in enumerate(inspection.traffic):
        y = _TOP + p * cell
        if p % every == 0:
            out.append(_text(_LEFT - 8, y + cell / 2 + 4, f"part {p}", "faint", "end"))
            out.append(_text(_LEFT + (p + 0.5) * cell, _TOP - 8, str(p), "faint", "middle"))
        for q, rows in enumerate(row):
            x = _LEFT + q * cell
            tip = f"<title>part {p} to part {q}: {rows:,} rows</title>"
            # Never quite opaque: the number on it is read in light and in dark.
            out.append(
                f'<rect class="cell" x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" '
                f'fill-opacity="{0.04 + 0.6 * rows / most:.3f}">{tip}</rect>'
            )
            if numbered and p != q:
                out.append(_text(x + cell / 2, y + cell / 2 + 4, short(rows), "", "middle"))
        if p % every == 0:
            out.append(_text(_LEFT + num_parts * cell + 8, y + cell / 2 + 4, short(sum(row)), "faint"))
    bottom = _TOP + num_parts * cell + 16
    for q in range(0, num_parts, every):
        received = inspection.parts[q].num_received
        out.append(_text(_LEFT + (q + 0.5) * cell, bottom, short(received), "faint", "middle"))
    out.append(_text(_LEFT - 8, bottom, "received", "faint", "end"))
    out.append(_text(_LEFT + num_parts * cell + 8, _TOP - 8, "sent", "faint"))
    return out


def _bars(load: Load, left: float, top: float, width: float) -> list[str]:
    shares, trainers = load.subpart_shares, load.trainers_per_part
    allowed = load.allowed
    scale = _BAR_HEIGHT / max(1.1, *shares, 1.02 * (allowed or 0))
    step = width / len(shares)
    said = "" if allowed is None else f", {allowed:.2f} allowed"
    out = [_text(left, top - 6, f"{load.name}: heaviest {load.balance.ratio:.3f}{said}")]
    for s, share in enumerate(shares):
        gap = 0.1 if s % trainers else 0.25  # a wider gap before each part
        over = allowed is not None and share > allowed + 1e-9
        height = share * scale
        name = f"part {s // trainers}" if trainers == 1 else f"part {s // trainers}, subpart {s}"
        tip = f"<title>{name}: {load.subparts[s]:,}, {share:.3f} of the average</title>"
        out.append(
            f'<rect class="{"over" if over else "bar"}" x="{left + (s + gap) * step:.2f}" '
            f'y="{top + _BAR_HEIGHT - height:.2f}" width="{(0.9 - gap) * step:.2f}" height="{height:.2f}" '
            f'fill-opacity="0.75">{tip}</rect>'
        )
        if s % (trainers * max(1, len(shares) // trainers // 16)) == 0:
            out.append(
                _text(left + (s + trainers / 2) * step, top + _BAR_HEIGHT + 14, str(s // trainers), "faint", "middle")
            )
    out.append(_line("line", left, left + width, top + _BAR_HEIGHT - scale))
    if allowed is not None:
        out.append(_line("limit", left, left + width, top + _BAR_HEIGHT - allowed * scale))
    return out


def _title(x: float, title: str, subtitle: str) -> list[str]:
    return [_text(x, 20, title, "title"), _text(x, 36, subtitle, "faint")]


def _line(kind: str, x1: float, x2: float, y: float) -> str:
    return f'<line class="{kind}" x1="{x1}" x2="{x2}" y1="{y:.2f}" y2="{y:.2f}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text x="{x:g}" y="{y:g}"{named} text-anchor="{anchor}">{escape(text)}</text>'


def short(count: int) -> str:
    """At most five characters: 950, 12.3k, 4.0M."""
    value = float(count)
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5 or unit == "T":
            return f"{value:.0f}{unit}" if unit == "" or value >= 99.95 else f"{value:.1f}{unit}"
        value /= 1000
    raise AssertionError("the last unit returns")


def _write_png(inspection: Inspection, path: Path) -> None:
    from matplotlib.figure import Figure

    num_loads = max(len(inspection.loads), 1)
    figure = Figure(figsize=(12, max(5, 1.5 * num_loads)), layout="constrained")
    panels = figure.subplot_mosaic([["matrix", f"load {i}"] for i in range(num_loads)])
    matrix = panels["matrix"]
    matrix.imshow(inspection.traffic, cmap="Blues", alpha=0.6)
    matrix.locator_params(integer=True)
    matrix.set(title="Rows sent per layer", xlabel="to part", ylabel="from part")
    if len(inspection.parts) <= _MOST_NUMBERED:
        for p, row in enumerate(inspection.traffic):
            for q, rows in enumerate(row):
                matrix.text(q, p, short(rows) if p != q else "", ha="center", va="center", fontsize=8)
    for i, load in enumerate(inspection.loads):
        _png_bars(panels[f"load {i}"], load.name, load.subpart_shares, load.allowed)
    figure.savefig(path)


def _png_bars(panel, name: str, shares: Sequence[float], allowed: float | None) -> None:  # type: ignore[no-untyped-def]
    panel.bar(range(len(shares)), shares)
    panel.locator_params(axis="x", integer=True)
    panel.axhline(1.0, color="gray", linewidth=1)
    if allowed is not None:
        panel.axhline(allowed, color="red", linewidth=1, linestyle="--")
    panel.set_title(f"{name}: every subpart to the average", fontsize=9)
