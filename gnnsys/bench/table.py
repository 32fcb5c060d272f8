"""The report as a person reads it on a screen: a line per row as it is measured, a verdict at the end."""

from __future__ import annotations

from gnnsys.bench.report import Report, Row

COLUMNS = (("name", 38), ("unit", 10), ("ours", 10), ("peer", 10), ("peer name", 22), ("ratio", 7), ("limit", 10))


def header() -> str:
    cells = [f"{title:<{width}}" if i in (0, 1, 4) else f"{title:>{width}}" for i, (title, width) in enumerate(COLUMNS)]
    line = "  ".join([*cells, "target"])
    return f"{line}\n{'-' * (len(line) + 8)}"


def line(row: Row) -> str:
    """One row; figures to three digits, `-` where there is none, and then the reason."""
    verdict = {True: " met", False: " MISSED", None: ""}[row.met]
    target = f">= {row.target:.2f}{verdict}" if row.target is not None else ""
    texts = (row.name, row.unit, _number(row.ours), _number(row.peer), row.peer_name, _ratio(row.ratio))
    cells = [*texts, _number(row.limit)]
    padded = [
        f"{c:<{w}}" if i in (0, 1, 4) else f"{c:>{w}}" for i, (c, (_, w)) in enumerate(zip(cells, COLUMNS, strict=True))
    ]
    ending = target if row.reason is None else f"{target}  ({row.reason})".lstrip()
    return "  ".join([*padded, ending]).rstrip()


def footer(report: Report) -> str:
    """What was not compared and why, and how many targets were met."""
    lines = [f"not here: {peer} ({reason})" for peer, reason in report.absent.items()]
    for case, reasons in report.refused.items():
        lines += [f"cannot do {case}: {peer} ({reason})" for peer, reason in reasons.items()]
    judged = [row for row in report.rows if row.met is not None]
    if report.quick:
        lines.append("quick sizes: targets are shown, not judged")
    elif judged:
        lines.append(f"{sum(row.met is True for row in judged)} of {len(judged)} targets met")
    lines.append("ratio: how many times better ours is; bigger is better")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
