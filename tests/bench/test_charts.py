"""Pictures of results: what is in them is read back from the SVG."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from gnnsys.bench.charts.axes import BOTTOM, TOP, Axes, round_up, ticks
from gnnsys.cli import main

SVG = "{http://www.w3.org/2000/svg}"


def write_cell(
    folder: Path,
    trainers: int,
    option: str,
    seconds: list[float],
    *,
    remote: float = 0.0,
    accuracy: bool = False,
    sampler: str = "neighbor",
) -> None:
    """As the runner writes it: 1000 seeds an epoch of every trainer."""
    rates = [1000 * trainers / s for s in seconds]
    measures = {"seeds/s": rates, "s/epoch": seconds, "MB of remote rows/epoch": [remote] * len(seconds)}
    measures |= {"accuracy": [0.8]} if accuracy else {}
    curve = [[1.0, 0.4], [2.0, 0.8]] if accuracy else []
    cell = {"dataset": "sbm-2k", "model": "GCN", "sampler": sampler, "fanouts": [5, 5], "hosts": 1}
    cell |= {"trainers": trainers, "option": option, "options": {"accuracy": 0.75 if accuracy else None}}
    name = f"sbm-2k/GCN/5,5/1x{trainers}/{option}"
    told = {
        "kind": "gnnsys-suite-cell", "name": name, "status": "done", "reason": None, "cell": cell,
        "measures": {n: {"more_is_better": n == "seeds/s", "samples": s} for n, s in measures.items()},
        "figures": {"ranks": [[{"seconds": 2.0, "curve": curve}]]},
    }  # fmt: skip
    (folder / "cells").mkdir(parents=True, exist_ok=True)
    (folder / "cells" / f"{sampler}-{trainers}-{option}.json").write_text(json.dumps(told))
    order = {"samplers": ["5,5", "labor 5,5", "guided 5,5"], "options": {"plain": {}, "fast": {}}}
    (folder / "suite.json").write_text(json.dumps({"told": order}))


def texts(path: Path) -> list[str]:
    return [str(each.text) for each in ElementTree.parse(path).iter(f"{SVG}text")]


def test_scaling_has_a_point_with_a_whisker_per_cell_and_an_ideal_line(tmp_path: Path):
    for trainers, seconds in ((1, [1.0, 1.1, 1.2]), (2, [1.3, 1.3, 1.4]), (4, [1.6, 1.5, 1.9])):
        write_cell(tmp_path, trainers, "plain", seconds)
    assert main(["bench", "plot", str(tmp_path), "--kind", "scaling", "--out", str(tmp_path / "a.svg")]) == 0
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    dots = [float(dot.get("cy", "")) for dot in root.iter(f"{SVG}circle")]
    whiskers = [path.get("d", "") for path in root.iter(f"{SVG}path") if path.get("class") == "whisker"]
    assert len(dots) == 3 == len(whiskers) and dots == sorted(dots, reverse=True)  # up is less
    ideal, measured = root.iter(f"{SVG}polyline")
    assert ideal.get("class") == "ideal" and measured.get("points", "").count(",") == 3
    (_, first), (x, last) = (map(float, point.split(",")) for point in ideal.get("points", "").split())
    floor = 400 - BOTTOM
    assert floor - last == pytest.approx(4 * (floor - first), abs=0.5)  # all of it, to four times the first
    assert last > TOP and x == pytest.approx([float(dot.get("cx", "")) for dot in root.iter(f"{SVG}circle")][-1])
    assert {"trainers", "seeds/s", "1", "2", "4", "Scaling: sbm-2k/GCN/5,5/plain"} <= set(texts(tmp_path / "a.svg"))


def test_bars_have_the_order_of_the_suite_and_say_how_many_times_faster(tmp_path: Path, capsys):
    write_cell(tmp_path, 1, "fast", [1.0] * 5, remote=1.5)
    write_cell(tmp_path, 1, "plain", [2.5] * 5, remote=6.0)
    assert main(["bench", "plot", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "plots" / f"{k}.svg") for k in ("ablation", "traffic")]
    said = texts(tmp_path / "plots" / "ablation.svg")
    assert [words for words in said if "x)" in words] == ["400 (1.00x)", "1,000 (2.50x)"]
    assert said.index("plain") < said.index("fast")
    assert {"6", "1.5", "MB an epoch", "Traffic: sbm-2k/GCN/5,5/1x1"} <= set(texts(tmp_path / "plots" / "traffic.svg"))
    root = ElementTree.parse(tmp_path / "plots" / "ablation.svg").getroot()
    heights = [float(bar.get("height", "")) for bar in root.iter(f"{SVG}rect")]
    assert heights[1] / heights[0] == pytest.approx(2.5, rel=0.01)


def test_bars_of_several_groups_are_each_beside_the_first_of_its_own(tmp_path: Path):
    for trainers, plain, fast in ((1, 2.0, 1.0), (2, 3.0, 2.0)):
        write_cell(tmp_path, trainers, "plain", [plain] * 5)
        write_cell(tmp_path, trainers, "fast", [fast] * 5)
    assert main(["bench", "plot", str(tmp_path), "--kind", "ablation", "--out", str(tmp_path / "a.svg")]) == 0
    said = texts(tmp_path / "a.svg")
    assert [words for words in said if words.endswith("x")] == ["1.00x", "2.00x", "1.00x", "1.50x"]
    assert {"1x1", "1x2", "plain", "fast", "By option: sbm-2k/GCN/5,5"} <= set(said)


def test_samplers_are_compared_where_options_are_all_the_same(tmp_path: Path):
    for sampler, seconds in (("guided", 1.0), ("neighbor", 2.0), ("labor", 1.6)):
        write_cell(tmp_path, 1, "plain", [seconds] * 5, sampler=sampler)
    assert main(["bench", "plot", str(tmp_path), "--kind", "ablation", "--out", str(tmp_path / "a.svg")]) == 0
    said = texts(tmp_path / "a.svg")
    assert [words for words in said if "x)" in words] == ["500 (1.00x)", "625 (1.25x)", "1,000 (2.00x)"]
    assert [words for words in said if words.endswith("5,5")] == ["5,5", "labor 5,5", "guided 5,5"]


def test_accuracy_is_a_curve_over_seconds_of_training(tmp_path: Path):
    write_cell(tmp_path, 1, "plain", [1.0], accuracy=True)
    write_cell(tmp_path, 2, "plain", [1.0], accuracy=True)
    assert main(["bench", "plot", str(tmp_path), "--kind", "accuracy", "--out", str(tmp_path / "a.svg")]) == 0
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert len(list(root.iter(f"{SVG}circle"))) == 4
    assert {"1x1", "1x2", "accuracy", "Time to accuracy: sbm-2k/GCN/5,5/plain"} <= set(texts(tmp_path / "a.svg"))


@pytest.mark.parametrize("most", [0.0031, 0.9, 1.0, 7.0, 64.0, 99.0, 12345.0])
def test_axes_end_behind_what_they_show_and_have_few_ticks(most: float):
    end = round_up(most)
    assert most < end <= 1.6 * most
    assert 4 <= len(ticks(end)) <= 11
    axes = Axes("a", "x", "y", 1.0, end)
    assert axes.y(0) > axes.y(most) > 0


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            ["results", "--kind", "pie"],
            "there is no picture 'pie'; choose one of: scaling, ablation, accuracy, traffic",
        ),
        (["results", "--out", "a.svg"], "--out a.svg is one file: say which picture by --kind"),
        (["results", "--out", "a.pdf"], "--out a.pdf: pictures end with .svg or .png"),
        (["results", "--kind", "accuracy"], "results has nothing to draw for accuracy"),
        (["gone"], "gone is no result folder of `gnnsys bench suite`"),
    ],
)
def test_what_cannot_be_drawn_is_told_in_one_line(tmp_path: Path, monkeypatch, capsys, told, message):
    monkeypatch.chdir(tmp_path)
    write_cell(Path("results"), 1, "plain", [1.0])
    assert main(["bench", "plot", *told]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_a_png_is_drawn_where_cairosvg_is_and_else_the_remedy_is_told(tmp_path: Path, capsys):
    write_cell(tmp_path, 1, "plain", [1.0])
    write_cell(tmp_path, 2, "plain", [1.0])
    file = tmp_path / "a.png"
    code = main(["bench", "plot", str(tmp_path), "--kind", "scaling", "--out", str(file)])
    if code:
        assert "PNG needs cairosvg: pip install cairosvg, or write .svg" in capsys.readouterr().err
    else:
        assert file.read_bytes().startswith(b"\x89PNG")
