"""Accuracy of examples/rgcn.py on real typed graphs, over five seeds, by one trainer and by four on parts.

python -m tests.examples.typed_accuracy aifb 1 4         # prints every seed, mean and standard deviation
python -m tests.examples.typed_accuracy aifb/embedding 1 # one row per node instead of one per node and relation

aifb has the settings of Schlichtkrull et al. 2018 (two layers, 16 hidden, no bases, no penalty, 50 epochs of Adam with
0.01, all 140 labels). dblp_hetero has one setting that was written down before its test score was seen.
"""

from __future__ import annotations

import re
import runpy
import statistics
import sys
import tempfile
from pathlib import Path

from gnnsys.graph.datasets import find_dataset
from gnnsys.partition import partition_graph
from tests.support.processes import run_ranks

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rgcn.py"
AIFB = "--hidden 16 --fanout -1 -1 --dropout 0 --weight-decay 0 --epochs 50 --batch-size 140 --train-on-val"
OPTIONS = {
    "aifb": f"--one-hot {AIFB}",
    "aifb/embedding": AIFB,
    "dblp_hetero": "--hidden 64 --fanout 10 10 --dropout 0.5 --epochs 10 --batch-size 120",
}
SEEDS = range(5)
PROGRAM = "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
DEADLINE = 900  # seconds a seed; it takes five to thirty


def parts_of(name: str, folder: Path, num_parts: int) -> Path:
    """With the reverses and the masks that the example gives a file."""
    partition_graph(runpy.run_path(str(EXAMPLE))["read_typed"](str(find_dataset(name))), num_parts, folder)
    return folder


def scores(name: str, trainers: int, graph: Path) -> dict[str, list[float]]:
    """Micro and macro F1 on the test nodes, by seed. Every trainer is a process with one thread."""
    found: dict[str, list[float]] = {"micro": [], "macro": []}
    for seed in SEEDS:
        arguments = [EXAMPLE, graph, *OPTIONS[name].split(), "--seed", seed, "--device", "cpu"]
        environment = {"OMP_NUM_THREADS": "1"}
        first, *_ = run_ranks(PROGRAM, trainers, *arguments, timeout=DEADLINE, environment=environment)
        for how, values in found.items():
            values.append(float(re.findall(rf"test {how} ([\d.]+)", first.stdout)[-1]))
    return found


def main(name: str, *trainers: str) -> None:
    dataset = name.partition("/")[0]
    with tempfile.TemporaryDirectory() as folder:
        for count in map(int, trainers or ("1",)):
            graph = find_dataset(dataset) if count == 1 else parts_of(dataset, Path(folder) / f"{count} parts", count)
            for how, values in scores(name, count, graph).items():
                mean, spread = statistics.mean(values), statistics.stdev(values)
                print(f"{name}, {count} trainers, {how}-F1: {mean:.4f} +- {spread:.4f}  {values}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
