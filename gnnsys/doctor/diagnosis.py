"""One line of the doctor's report: what is, why it matters, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, ADVICE, FAILS = "ok", "advice", "fails"


@dataclass(frozen=True)
class Diagnosis:
    """`subject` is what was looked at, `found` what is. `why` and `remedy` are empty where all is well.

    `state`: FAILS where something will not work, ADVICE where it works, but could be better.
    """

    subject: str
    found: str
    why: str = ""
    remedy: str = ""
    state: str = OK

    def __post_init__(self) -> None:
        assert self.state in (OK, ADVICE, FAILS)
        assert (self.state == OK) == (not self.remedy), "what is not well has a remedy"
        assert "\n" not in f"{self.found}{self.why}{self.remedy}", "one line each"

    def __str__(self) -> str:
        said = f"{self.state:<7} {self.subject:<14} {self.found}"
        return f"{said}: {self.why}. Remedy: {self.remedy}" if self.remedy else said


def exit_code(diagnoses: Sequence[Diagnosis]) -> int:
    """1 where something will fail."""
    return int(any(each.state == FAILS for each in diagnoses))


def report_text(diagnoses: Sequence[Diagnosis]) -> str:
    """A line for each, and how many there are of which kind."""
    counts = {state: sum(each.state == state for each in diagnoses) for state in (OK, ADVICE, FAILS)}
    total = f"{counts[OK]} ok, {counts[ADVICE]} to improve, {counts[FAILS]} that will fail"
    return "\n".join([*map(str, diagnoses), total])
