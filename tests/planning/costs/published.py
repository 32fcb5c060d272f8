"""Tables 2 and 6 of DAHA (Li et al., PVLDB 17(6), 2024): what its operators took on its two machines, as data.

Table 6 does not say what shapes were measured. What makes it consistent with Table 2:

- its figures are seconds of 100 epochs; those of M1 are multiples of 0.1, so its clock told milliseconds;
- `spmm` is A times the features, at their full width, A with self loops (Eq. 1): CS and Physics then take the same time
  per multiply-add, to 12% on the processors and 29% on the GPUs, and Pubmed's narrow rows more;
- `mm` is features times weights of 16 columns, forward alone: 46 to 50 GB of features a second on M1's processor;
- `Data transfer` is Vol_G and Vol_F of Table 2, whose MB are 2^20 bytes: 7.2 to 8.5 GB/s on M1 and 4.4 to 4.6 on M2, so
  the copies were from pageable memory.

`python -m tests.planning.costs.published --write` makes examples/machines/m1.json and m2.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gnnsys.planning import MachineProfile, Observation

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "examples" / "machines"
HIDDEN, EPOCHS = 16, 100
GRAPHS = {  # nodes, edges, features, Vol_G and Vol_F in MB
    "Pubmed": (19717, 88648, 500, 3.382, 38.0),
    "CS": (18333, 163788, 6805, 3.125, 476.0),
    "Physics": (34493, 495924, 8415, 9.459, 1108.0),
}
TRUTH = {  # machine, operation, device -> seconds of 100 epochs on Pubmed, CS and Physics
    ("M1", "spmm", "host"): (5.8, 68.8993, 243.9285),
    ("M1", "spmm", "device"): (0.5, 6.2001, 17.3027),
    ("M1", "mm", "host"): (0.3001, 1.0, 2.4999),
    ("M1", "mm", "device"): (0.1, 0.1001, 0.2),
    ("M1", "copy", "bus"): (0.6, 6.0110, 13.8314),
    ("M2", "spmm", "host"): (4.8111, 57.3462, 231.3737),
    ("M2", "spmm", "device"): (0.2213, 1.8583, 6.1514),
    ("M2", "mm", "host"): (0.0209, 0.8864, 2.2079),
    ("M2", "mm", "device"): (0.0147, 0.2030, 0.3689),
    ("M2", "copy", "bus"): (0.9971, 10.9417, 25.2243),
}
PREDICTED = {  # by the paper's own model
    ("M1", "spmm", "host"): (5.7397, 69.2511, 235.2394),
    ("M1", "spmm", "device"): (0.4994, 5.5836, 17.6340),
    ("M1", "mm", "host"): (0.3061, 0.9029, 2.4201),
    ("M1", "mm", "device"): (0.0945, 0.0988, 0.2044),
    ("M1", "copy", "bus"): (0.5434, 5.9200, 13.6227),
    ("M2", "spmm", "host"): (4.8857, 58.1973, 276.5741),
    ("M2", "spmm", "device"): (0.2224, 1.7921, 6.3681),
    ("M2", "mm", "host"): (0.0216, 0.9073, 2.2909),
    ("M2", "mm", "device"): (0.0142, 0.1890, 0.3719),
    ("M2", "copy", "bus"): (0.9793, 11.0075, 22.1922),
}
# What the table does not have is from data sheets. M1: an i9-12900KF (8 fast cores and 8 slow ones), DDR5-4800, an RTX
# 3080 Ti on PCIe 4. M2: a Xeon Gold 6240 (18 cores), six channels of DDR4-2933, an RTX 2080 Ti on PCIe 3.
SHEETS = {
    "M1": {
        "processor": "Intel i9-12900KF", "cores": 16, "host_gbs_per_core": 3.8, "host_gflops_per_core": 50.0,
        "host_cache_mb": 30.0, "device_cache_mb": 6.0,
        "gpu": "NVIDIA GeForce RTX 3080 Ti", "device_gbs": 730.0, "device_tflops": 27.0, "bus_gbs": 25.0,
    },
    "M2": {
        "processor": "Intel Xeon Gold 6240", "cores": 18, "host_gbs_per_core": 6.2, "host_gflops_per_core": 60.0,
        "host_cache_mb": 24.75, "device_cache_mb": 5.5,
        "gpu": "NVIDIA GeForce RTX 2080 Ti", "device_gbs": 490.0, "device_tflops": 11.0, "bus_gbs": 12.0,
    },
}  # fmt: skip
_COPIES = ("copy/up", "copy/down", "copy/pageable")  # all as the paper's were


def sizes_of(operation: str, graph: str) -> dict[str, float]:
    """Of one call, as said above."""
    nodes, edges, features, structure_mb, feature_mb = GRAPHS[graph]
    if operation == "spmm":
        return {"edges": edges + nodes, "destinations": nodes, "width": features, "sources": nodes}
    if operation == "mm":
        return {"rows": nodes, "inner": features, "width": HIDDEN}
    return {"bytes": (structure_mb + feature_mb) * (1 << 20)}


def operators_of(operation: str, place: str) -> tuple[str, ...]:
    return {"spmm": (f"spmm/{place}",), "mm": (f"product/{place}",), "copy": _COPIES}[operation]


def observations(machine: str) -> list[Observation]:
    return [
        Observation(operator, sizes_of(operation, graph), seconds / EPOCHS)
        for (of, operation, place), row in TRUTH.items()
        if of == machine
        for graph, seconds in zip(GRAPHS, row, strict=True)
        for operator in operators_of(operation, place)
    ]


def published_profile(machine: str) -> MachineProfile:
    """The machine's data sheet, with the operators of Table 6 fitted to it."""
    described = MachineProfile.from_rates(**SHEETS[machine])
    return described.fitted_to(observations(machine), f"DAHA's {machine}: Table 6, and data sheets for what it lacks")


def errors(machine: str) -> dict[str, list[float]]:
    """By operator, how far its fit is from each time that it was fitted to."""
    made, found = published_profile(machine), dict[str, list[float]]()
    for seen in observations(machine):
        found.setdefault(seen.operator, []).append(made.seconds(seen.operator, **seen.sizes) / seen.seconds - 1)
    return found


if __name__ == "__main__":
    for each in SHEETS:
        print(published_profile(each).report())
        for operator, apart in errors(each).items():
            print(f"  {operator}: " + ", ".join(f"{share:+.1%}" for share in apart))
        if "--write" in sys.argv[1:]:
            FOLDER.mkdir(exist_ok=True)
            published_profile(each).save(FOLDER / f"{each.lower()}.json")
