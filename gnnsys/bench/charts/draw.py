"""What is drawn of a suite's results. Points and bars are medians over repeats, whiskers their 95% intervals.

scaling: seeds/s over the number of trainers. ablation: seeds/s by option, or by sampler. accuracy: validation accuracy
over seconds of training. traffic: megabytes an epoch by cell.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnnsys.bench.charts.axes import COLOURS, FAINT, LEFT, Axes, number, round_up
from gnnsys.bench.compare_results import median_interval
from gnnsys.bench.results import CELL_KIND

ENDINGS = (".svg", ".png")
BAR_WIDTH = 52  # pixels, of a bar with its words
LEAST_MEGABYTES = 1e-3  # cells that move less have no bars
LETTER = 6.8  # pixels of a letter in slanted words, from left to right
RATE, ROWS, LINK = "seeds/s", "MB of remote rows/epoch", "MB on the busiest link/epoch"


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
    done = [cell for cell in cells if cell["status"] == "done"]
    keys = {"dataset": "datasets", "model": "models", "sampler": "samplers", "option": "options"}
    places = {
        axis: {str(name): number for number, name in enumerate(told.get(key) or ())} for axis, key in keys.items()
    }

    def place(cell: dict[str, Any]) -> tuple[int, ...]:
        axes = _axes_of(cell)
        *first, option = (places[axis].get(axes[axis], 0) for axis in keys)
        return *first, cell["cell"]["hosts"], cell["cell"]["trainers"], option

    return sorted(done, key=place)


def draw_chart(kind: str, cells: list[dict[str, Any]]) -> str | None:
    """As SVG; None where the cells do not have what it shows."""
    return KINDS[kind](cells)


def scaling(cells: list[dict[str, Any]]) -> str | None:
    """A line for all cells that differ in their ranks alone, and beside it the first one's rate times the trainers."""
    by_name: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cell in cells:
        by_name[_but(cell, "ranks")].append(cell)
    series = [sorted(group, key=_num_trainers) for group in by_name.values() if len(group) > 1]
    if not series:
        return None
    common, names = _short_names([group[0] for group in series], left_out="ranks")
    shown = [cell for group in series for cell in group]
    ideals = [_ideal(group) for group in series]
    most = max([median_interval(_samples(cell, RATE))[1] for cell in shown] + [line[-1][1] for line in ideals])
    axes = Axes(f"Scaling: {common}", "trainers", RATE, 1.08 * max(map(_num_trainers, shown)), round_up(most))
    for colour, name, group, ideal in zip(_colours(), names, series, ideals, strict=False):
        axes.line(ideal, colour, dashed=True)
        points = [(_num_trainers(cell), statistics.median(_samples(cell, RATE))) for cell in group]
        axes.line(points, colour, dots=True)
        for cell, (x, _) in zip(group, points, strict=True):
            axes.error_bar(x, *median_interval(_samples(cell, RATE)))
        axes.legend.append((name or "measured", colour))
    axes.legend.append(("dashed: as many times the first as there are trainers", FAINT))
    counts = sorted({_num_trainers(cell) for cell in shown})
    return axes.render([(float(count), str(count)) for count in counts])


def _ideal(group: list[dict[str, Any]]) -> list[tuple[float, float]]:
    first, last = _num_trainers(group[0]), _num_trainers(group[-1])
    rate = statistics.median(_samples(group[0], RATE)) / first
    return [(first, rate * first), (last, rate * last)]


def ablation(cells: list[dict[str, Any]]) -> str | None:
    """Bars of cells that differ in their option alone, or else in their sampler; ratios are to the first of a group."""
    for axis in ("option", "sampler"):
        groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for cell in cells:
            groups[_but(cell, axis)].append(cell)
        chosen = [group for group in groups.values() if len(group) > 1]
        if chosen:
            common, names = _short_names([group[0] for group in chosen], left_out=axis)
            title, label = f"By {axis}: {common}", f"{RATE}, and how many times the first"
            if len(chosen) == 1:
                bars = [(_axes_of(cell)[axis], {RATE: _samples(cell, RATE)}) for cell in chosen[0]]
                return _bars(title, label, bars, ratios=True)
            grouped = [
                (name, {_axes_of(cell)[axis]: _samples(cell, RATE) for cell in group})
                for name, group in zip(names, chosen, strict=True)
            ]
            return _bars(title, label, grouped, ratios=True)
    return None


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
        axes.line([(0, value), (axes.most_x, value)], FAINT, dashed=True)
    return axes.render()


def traffic(cells: list[dict[str, Any]]) -> str | None:
    if not cells:
        return None
    common, names = _short_names(cells)
    moved = [{m: _samples(cell, m) for m in (ROWS, LINK) if m in cell["measures"]} for cell in cells]
    bars = [
        (name, by_measure)
        for name, by_measure in zip(names, moved, strict=True)
        if any(statistics.median(samples) >= LEAST_MEGABYTES for samples in by_measure.values())
    ]
    if not bars:
        return None
    return _bars(f"Traffic: {common}", "MB an epoch", bars)


KINDS: dict[str, Callable[[list[dict[str, Any]]], str | None]] = {
    "scaling": scaling,
    "ablation": ablation,
    "accuracy": accuracy,
    "traffic": traffic,
}


def _bars(title: str, label: str, bars: list[tuple[str, dict[str, list[float]]]], *, ratios: bool = False) -> str:
    """Groups of bars, by name, in the colours of their kinds. `ratios`: to the first bar of all, or of its group."""
    kinds = list(dict.fromkeys(kind for _, by_kind in bars for kind in by_kind))
    most = max(median_interval(samples)[1] for _, by_kind in bars for samples in by_kind.values())
    slanted = max(len(name) for name, _ in bars) > 14
    width = max(640, 130 + len(bars) * (24 + BAR_WIDTH * len(kinds)))
    step = width / len(bars)
    reach = max(LETTER * len(name) - (place + 0.5) * step for place, (name, _) in enumerate(bars))
    margin = max(LEFT, round(reach)) if slanted else LEFT  # slanted words begin further left
    axes = Axes(title, "", label, len(bars), round_up(most), width=width + margin - LEFT, left=margin)
    first = None
    for place, (_, by_kind) in enumerate(bars):
        share = 0.8 / len(kinds)
        first = first if len(kinds) == 1 else None
        for i, (kind, colour) in enumerate(zip(kinds, _colours(), strict=False)):
            if kind not in by_kind:
                continue
            samples, left = by_kind[kind], place + 0.1 + i * share
            value, (low, high) = statistics.median(samples), median_interval(samples)
            axes.bar(left, left + share * 0.92, value, colour)
            axes.error_bar(left + share * 0.46, low, high)
            first = value if first is None else first
            words = number(value)
            if ratios and first:
                words = f"{value / first:.2f}x" if len(kinds) > 1 else f"{words} ({value / first:.2f}x)"
            axes.text(left + share * 0.46, high, words)
    if len(kinds) > 1:
        axes.legend = list(zip(kinds, _colours(), strict=False))
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


def _short_names(cells: list[dict[str, Any]], left_out: str | None = None) -> tuple[str, list[str]]:
    """What all cells have in common, and of each what is its own; without one of the axes."""
    by_cell = [{axis: words for axis, words in _axes_of(cell).items() if axis != left_out} for cell in cells]
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
