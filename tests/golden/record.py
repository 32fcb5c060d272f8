"""Writes and compares golden records.

    python -m tests.golden.record                   # records.json, what the test compares with
    python -m tests.golden.record --exact FILE      # hashes of all results, computed floats too, of this machine
    python -m tests.golden.record --compare FILE    # the same again, and what differs from FILE

Integers and copied rows are recorded as SHA-256 of dtype, shape and bytes: the same on every machine. Computed floats
are recorded as numbers and compared to rounding, since BLAS differs between machines.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tests.golden.case import Case, leaves
from tests.golden.cases import CASES

RECORDS = Path(__file__).with_name("records.json")
RTOL, ATOL = 1e-4, 1e-6
_DIGITS = 32  # of a hash, hexadecimal
_ENTRIES = 8  # of a computed tensor
Record: TypeAlias = dict[str, Any]


def reason_to_skip(case: Case) -> str | None:
    missing = case.needs is not None and importlib.util.find_spec(case.needs) is None
    return f"{case.needs} is not installed" if missing else None


def record_of(case: Case, folder: Path, *, exact: bool = False) -> Record:
    """What is kept of a case's values, made with one thread of torch."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        values = case.make(folder)
    finally:
        torch.set_num_threads(num_threads)
    is_computed = case.is_computed and not exact
    return {name: _numbers(v) if is_computed and _is_float(v) else _digest(v) for name, v in values.items()}


def differences(found: Record, expected: Record) -> list[str]:
    """A line for everything that is not as recorded."""
    lines = [f"{name}: not there any more" for name in expected if name not in found]
    lines += [f"{name}: new" for name in found if name not in expected]
    for name in expected:
        if name in found:
            lines += [f"{name}: {what}" for what in _differs(found[name], expected[name])]
    return lines


def _is_float(value: Any) -> bool:
    numbers = _numeric_leaves(value)
    return bool(numbers) and all(
        each.is_floating_point() if isinstance(each, Tensor) else isinstance(each, float) for each in numbers
    )


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    for leaf in leaves(value):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {list(leaf.shape)}".encode())
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(json.dumps(leaf, sort_keys=True).encode())
    return digest.hexdigest()[:_DIGITS]


def _numbers(value: Any) -> list[Any]:
    """Plain numbers as they are; of each tensor its shape, norm, sum and some entries."""
    return [_rounded(leaf) if isinstance(leaf, float) else _summary(leaf) for leaf in _numeric_leaves(value)]


def _numeric_leaves(value: Any) -> list[Any]:
    return [each for leaf in leaves(value) for each in (leaf if isinstance(leaf, list) else [leaf])]


def _summary(tensor: Tensor) -> dict[str, Any]:
    flat = tensor.detach().double().reshape(-1)
    places = torch.linspace(0, max(0, flat.numel() - 1), min(_ENTRIES, flat.numel())).long()
    numbers = [float(flat.norm()), float(flat.sum()), *flat[places].tolist()]
    return {"dtype": str(tensor.dtype), "shape": list(tensor.shape), "numbers": [_rounded(n) for n in numbers]}


def _rounded(number: float) -> float:
    return float(f"{number:.8g}")


def _differs(found: Any, expected: Any) -> list[str]:
    if isinstance(found, str) or isinstance(expected, str):
        return [] if found == expected else ["other values"]
    if len(found) != len(expected):
        return [f"{len(found)} numbers or tensors, recorded were {len(expected)}"]
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if not _is_close(mine, theirs):
            return [f"entry {place} is {mine}, recorded was {theirs}"]
    return []


def _is_close(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Mapping) != isinstance(theirs, Mapping):
        return False
    if not isinstance(mine, Mapping):
        return math.isclose(mine, theirs, rel_tol=RTOL, abs_tol=ATOL)
    if (mine["dtype"], mine["shape"]) != (theirs["dtype"], theirs["shape"]):
        return False
    norm, _, *entries = theirs["numbers"]
    typical = norm / max(1, math.prod(theirs["shape"])) ** 0.5  # errors of entries, and of their sum, go by the whole
    scales = [norm, norm, *(max(abs(entry), typical) for entry in entries)]
    pairs = zip(mine["numbers"], theirs["numbers"], scales, strict=True)
    return all(abs(a - b) <= ATOL + RTOL * scale for a, b, scale in pairs)


# -- commands ----------------------------------------------------------------------------------------------------------


def record_all(*, exact: bool) -> dict[str, Record]:
    records = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            reason = reason_to_skip(case)
            if reason is not None:
                print(f"{name}: left out, {reason}", file=sys.stderr)
            elif exact or case.is_portable:
                records[name] = record_of(case, Path(folder), exact=exact)
    return records


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exact", metavar="FILE", type=Path, help="write exact hashes of everything to FILE")
    parser.add_argument("--compare", metavar="FILE", type=Path, help="compare with what --exact wrote")
    args = parser.parse_args(argv)
    if args.compare is not None:
        return _compare(record_all(exact=True), json.loads(args.compare.read_text()))
    left_out = [name for name, case in CASES.items() if reason_to_skip(case)]
    if args.exact is None and left_out:
        parser.error(f"records.json is written where all libraries are: {len(left_out)} cases cannot run here")
    target = args.exact or RECORDS
    records = record_all(exact=args.exact is not None)
    target.write_text(_format(records))
    print(f"{len(records)} cases written to {target}")
    return 0


def _format(records: Mapping[str, Record]) -> str:
    """JSON with a line for every name, so that a change reads well in a diff."""
    cases = []
    for name, record in records.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in record.items()]
        cases.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(cases) + "\n}\n"


def _compare(found: dict[str, Record], expected: dict[str, Record]) -> int:
    lines = [f"{name}: not there any more" for name in expected if name not in found]
    lines += [f"{name}: not in the file" for name in found if name not in expected]
    for name in found.keys() & expected.keys():
        lines += [f"{name}: {line}" for line in differences(found[name], expected[name])]
    print("\n".join([*sorted(lines), f"{len(found)} cases, {len(lines)} differences"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
