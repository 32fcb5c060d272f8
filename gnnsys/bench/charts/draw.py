"""What is drawn of a suite's results. Points and bars are medians over repeats, whiskers their 95% intervals.

scaling: seeds/s over the number of trainers. ablation: an epoch's seconds by option. accuracy: validation accuracy over
seconds of training. traffic: megabytes an epoch by cell.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnsys.bench.charts.axes import COLOURS, Axes, number, round_up
from gnnsys.bench.compare_results import median_interval
from gnnsys.bench.results import CELL_KIND

ENDINGS = (".svg", ".png")
ROWS, LINK = "MB of remote rows/epoch", "MB on the busiest link/epoch"


def plot_results(results: Path, out: Path | None, kind: str | None) -> list[Path]:
    """Writes the pictures that these results have: one `kind` to the file `out`, or each into a folder."""
    cells = read_cells(results)
    if kind is not None and kind not in KINDS:
        raise ValueError(f"there is no picture {kind!r}; choose one of: {', '.join(KINDS)}")
    is_file = out is not None and out.suffix in ENDINGS
    if is_file and kind is None:
        raise ValueError(f"--out {out} is one file: say which picture by --kind {'|'.join(KINDS)}")
    if out is not None and out.suffix and not is_file:
        raise ValueError(f"--out {out}: pictures end with {' or '.join(ENDINGS)}")
    wanted = [kind] if kind else list(KINDS)
    drawn = {each: svg for each in wanted if (svg := draw_chart(each, cells)) is not None}
    if not drawn:
        raise ValueError(
            f"{results} has nothing to draw for {', '.join(wanted)}: see docs/suites.md for what each needs"
        )
    folder = results / "plots" if out is None else out
    if not is_file:
        folder.mkdir(parents=True, exist_ok=True)
    written = []
    for each, svg in drawn.items():
        path = out if is_file and out is not None else folder / f"{each}.svg"
        _write(path, svg)
        written.append(path)
    return written


def read_cells(results: Path) -> list[dict[str, Any]]:
    """Cells that have figures, in the order of the suite."""
    files = sorted((results / "cells").glob("*.json"))
    cells = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if not cells or any(cell.get("kind") != CELL_KIND for cell in cells):
        raise ValueError(f"{results} is no result folder of `gnnsys bench suite`")
    told = json.loads((results / "suite.json").read_text(encoding="utf-8"))["told"]
    order = list(told.get("options") or {})
    done = [cell for cell in cells if cell["status"] == "done"]
    place = {name: number for number, name in enumerate(order)}
    return sorted(done, key=lambda c: (_but(c, "option"), place.get(c["cell"]["option"], 0), _num_trainers(c)))


def draw_chart(kind: str, cells: list[dict[str, Any]]) -> str | None:
    """As SVG; None where the cells do not have what it shows."""
    return KINDS[kind](cells)


def scaling(cells: list[dict[str, Any]]) -> str | None:
    series: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        series[_but(cell, "ranks")].append(cell)
    series = {name: sorted(group, key=_num_trainers) for name, group in series.items() if len(group) > 1}
    if not series:
        return None
    shown = [cell for group in series.values() for cell in group]
    most = max(median_interval(_samples(cell, "seeds/s"))[1] for cell in shown)
    axes = Axes("Scaling", "trainers", "seeds/s", 1.08 * max(map(_num_trainers, shown)), round_up(most))
    for colour, (name, group) in zip(_colours(), series.items(), strict=False):
        first = group[0]
        rate = statistics.median(_samples(first, "seeds/s")) / _num_trainers(first)
        end = min(_num_trainers(group[-1]), axes.most_y / rate)
        axes.line([(_num_trainers(first), rate * _num_trainers(first)), (end, rate * end)], None)
        points = [(_num_trainers(cell), statistics.median(_samples(cell, "seeds/s"))) for cell in group]
        axes.line(points, colour, dots=True)
        for cell, (x, _) in zip(group, points, strict=True):
            axes.error_bar(x, *median_interval(_samples(cell, "seeds/s")))
        axes.legend.append((name, colour))
    names = {count: str(count) for count in map(_num_trainers, shown)}
    return axes.render([(float(count), words) for count, words in sorted(names.items())])


def ablation(cells: list[dict[str, Any]]) -> str | None:
    """Bars of the first group of cells that differ by their option; ratios are to its first bar."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        groups[_but(cell, "option")].append(cell)
    name, group = max(groups.items(), key=lambda item: len(item[1]), default=("", []))
    if len(group) < 2:
        return None
    bars = [(cell["cell"]["option"], {"s/epoch": _samples(cell, "s/epoch")}) for cell in group]
    return _bars(f"Ablation: {name}", "seconds an epoch, and how many times faster than the first", bars, ratios=True)


def accuracy(cells: list[dict[str, Any]]) -> str | None:
    curves = [(cell, _middle_curve(cell)) for cell in cells if "accuracy" in cell["measures"]]
    if not curves:
        return None
    most = max(curve[-1][0] for _, curve in curves)
    common, names = _short_names([cell for cell, _ in curves])
    axes = Axes(
        f"Time to accuracy: {common}", "seconds of training (validation not counted)", "accuracy", round_up(most), 1.0
    )
    for colour, name, (_, curve) in zip(_colours(), names, curves, strict=False):
        axes.line(curve, colour, dots=True)
        axes.legend.append((name, colour))
    wanted = {cell["cell"]["options"]["accuracy"] for cell, _ in curves}
    for value in wanted:
        axes.line([(0, value), (axes.most_x, value)], None)
    return axes.render()


def traffic(cells: list[dict[str, Any]]) -> str | None:
    if not cells:
        return None
    common, names = _short_names(cells)
    moved = [{m: _samples(cell, m) for m in (ROWS, LINK) if m in cell["measures"]} for cell in cells]
    bars = list(zip(names, moved, strict=True))
    if not any(statistics.median(samples) for _, by_measure in bars for samples in by_measure.values()):
        return None
    return _bars(f"Traffic: {common}", "MB an epoch", bars)


KINDS: dict[str, Callable[[list[dict[str, Any]]], str | None]] = {
    "scaling": scaling,
    "ablation": ablation,
    "accuracy": accuracy,
    "traffic": traffic,
}


def _bars(title: str, label: str, bars: list[tuple[str, dict[str, list[float]]]], *, ratios: bool = False) -> str:
    measures = list(dict.fromkeys(measure for _, by_measure in bars for measure in by_measure))
    most = max(median_interval(samples)[1] for _, by_measure in bars for samples in by_measure.values())
    slanted = max(len(name) for name, _ in bars) > 14
    axes = Axes(title, "", label, len(bars), round_up(most), width=max(640, 130 + 60 * len(bars)))
    first = None
    for place, (_, by_measure) in enumerate(bars):
        width = 0.7 / len(measures)
        for i, (measure, colour) in enumerate(zip(measures, COLOURS, strict=False)):
            if measure not in by_measure:
                continue
            samples, left = by_measure[measure], place + 0.15 + i * width
            value, (low, high) = statistics.median(samples), median_interval(samples)
            axes.bar(left, left + width * 0.95, value, colour)
            axes.error_bar(left + width / 2, low, high)
            first = value if first is None else first
            words = f"{number(value)} ({first / value:.2f}x)" if ratios and value else number(value)
            axes.text(left + width / 2, high, words)
    if len(measures) > 1:
        axes.legend = list(zip(measures, COLOURS, strict=False))
    return axes.render([(place + 0.5, name) for place, (name, _) in enumerate(bars)], slanted=slanted)


def _middle_curve(cell: dict[str, Any]) -> list[tuple[float, float]]:
    """The repeat whose training took the median time."""
    repeats = sorted(cell["figures"]["ranks"][0], key=lambda repeat: repeat["seconds"])
    return [(seconds, share) for seconds, share in repeats[(len(repeats) - 1) // 2]["curve"]]


def _but(cell: dict[str, Any], left_out: str) -> str:
    """The cell's name without one of its axes."""
    return "/".join(words for axis, words in _axes_of(cell).items() if axis != left_out)


def _axes_of(cell: dict[str, Any]) -> dict[str, str]:
    told = cell["cell"]
    fanouts = ",".join(map(str, told["fanouts"]))
    sampler = fanouts if told["sampler"] == "neighbor" else f"{told['sampler']} {fanouts}"
    ranks = f"{told['hosts']}x{told['trainers']}"
    return {
        "dataset": told.get("label") or told["dataset"], "model": told["model"], "sampler": sampler, "ranks": ranks,
        "option": told["option"],
    }  # fmt: skip


def _short_names(cells: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """What all cells have in common, and of each what is its own."""
    by_cell = [_axes_of(cell) for cell in cells]
    common = [axis for axis in by_cell[0] if len({axes[axis] for axes in by_cell}) == 1]
    own = ["/".join(words for axis, words in axes.items() if axis not in common) for axes in by_cell]
    return "/".join(by_cell[0][axis] for axis in common), own


def _num_trainers(cell: dict[str, Any]) -> int:
    return cell["cell"]["hosts"] * cell["cell"]["trainers"]


def _samples(cell: dict[str, Any], measure: str) -> list[float]:
    return cell["measures"][measure]["samples"]


def _colours() -> list[str]:
    return list(COLOURS) * 100


def _write(path: Path, svg: str) -> None:
    if path.suffix == ".svg":
        path.write_text(svg, encoding="utf-8")
        return
    if importlib.util.find_spec("cairosvg") is None:
        raise ValueError(f"{path}: PNG needs cairosvg: pip install cairosvg, or write .svg")
    import cairosvg

    cairosvg.svg2png(bytestring=svg.encode(), write_to=str(path), scale=2, background_color="white")
