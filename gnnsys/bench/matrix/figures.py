"""From what ranks say of their repeats to what is compared and drawn."""

from __future__ import annotations

from typing import Any

from gnnsys.bench.matrix.cell import Cell

MEGABYTE = 1e6


def cell_measures(cell: Cell, figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By name: whether more is better, and a sample per repeat. `figures` has the repeats of every rank."""
    repeats = list(zip(*figures["ranks"], strict=True))  # [repeats][ranks]
    seconds = [max(rank["seconds"] for rank in repeat) for repeat in repeats]
    epochs = [repeat[0]["epochs"] for repeat in repeats]
    seeds = [sum(rank["seeds"] for rank in repeat) for repeat in repeats]
    remote = [sum(_bytes_remote(rank["stages"]) for rank in repeat) for repeat in repeats]
    waited = [sum(rank["waited"] / rank["seconds"] for rank in repeat) / len(repeat) for repeat in repeats]
    cpu = [sum(rank["cpu_seconds"] for rank in repeat) for repeat in repeats]
    measures = {
        "seeds/s": _measure([n / s for n, s in zip(seeds, seconds, strict=True)], more_is_better=True),
        "s/epoch": _measure([s / n for s, n in zip(seconds, epochs, strict=True)]),
        "CPU s/epoch": _measure([s / n for s, n in zip(cpu, epochs, strict=True)]),
        "MB of remote rows/epoch": _measure([b / n / MEGABYTE for b, n in zip(remote, epochs, strict=True)]),
        "% waiting": _measure([100 * share for share in waited]),
    }
    if "traffic" in figures:
        busiest = [max(max(host) for host in repeat.values()) for repeat in figures["traffic"]]
        each = [b / n / MEGABYTE for b, n in zip(busiest, epochs, strict=True)]
        measures["MB on the busiest link/epoch"] = _measure(each)
    if cell.options.accuracy is not None:
        curves = [repeat[0]["curve"] for repeat in repeats]
        measures["accuracy"] = _measure([curve[-1][1] for curve in curves], more_is_better=True)
        if all(curve[-1][1] >= cell.options.accuracy for curve in curves):
            measures["s to accuracy"] = _measure([curve[-1][0] for curve in curves])
    return measures


def stage_counters(ranks: list[list[dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of all ranks and repeats together: seconds and counts by stage."""
    total: dict[str, dict[str, float]] = {}
    for repeat in (repeat for rank in ranks for repeat in rank):
        for stage, counts in repeat["stages"].items():
            own = total.setdefault(stage, {})
            for name, count in counts.items():
                own[name] = own.get(name, 0) + count
    return total


def _bytes_remote(stages: dict[str, dict[str, float]]) -> float:
    """Rows that a loader fetched, that ranks of full-graph training exchanged, that a guide explains with."""
    return sum(stages.get(name, {}).get("bytes_remote", 0) for name in ("fetch", "exchange", "guide"))


def _measure(samples: list[float], *, more_is_better: bool = False) -> dict[str, Any]:
    return {"more_is_better": more_is_better, "samples": samples}
