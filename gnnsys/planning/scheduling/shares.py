"""What share of the batches should go by which rule, if nothing but the busiest resource counts.

    minimise t  subject to  sum over rules of share * seconds on a resource <= t, for every resource; shares sum to 1

The value is a bound: a schedule of n batches keeps its busiest resource busy for n * t at least, whatever its order.
The shares are rounded to a short pattern, so that a batch's rule is a function of its index.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

_MOST_VERTICES = 50_000  # linear systems of at most five unknowns: a second
_SLACK = 1e-9  # of the largest number


@dataclass(frozen=True)
class RuleShares:
    """`seconds` a batch takes at least. `shares` of the batches go by each rule; `binding` resources are all busy."""

    seconds: float
    shares: dict[str, float]
    binding: tuple[str, ...]


def bound(uses: Mapping[str, Mapping[str, float]]) -> RuleShares | str:
    """The best shares of rules, by `uses[rule][resource]`, seconds of one batch; or why they are not known.

    Few rules are solved by looking at every vertex, with numpy alone; many need scipy (HiGHS).

    >>> bound({"bus": {"bus up": 6.0}, "cores": {"cores": 2.0}}).shares
    {'bus': 0.25, 'cores': 0.75}
    """
    if not uses:
        raise ValueError("there are no rules to choose shares of")
    rules = list(uses)
    resources = sorted({resource for used in uses.values() for resource in used})
    matrix = np.array([[uses[rule].get(resource, 0.0) for rule in rules] for resource in resources], dtype=np.float64)
    if not np.isfinite(matrix).all() or (matrix < 0).any():
        raise ValueError("seconds on a resource are numbers of 0 or more")
    alone = matrix.max(axis=0, initial=0.0)  # what each rule takes by itself
    scale = float(alone.min())  # so the optimum is at most 1, however slow other rules are
    if scale == 0:
        first = int(alone.argmin())
        return RuleShares(0.0, {rule: float(number == first) for number, rule in enumerate(rules)}, ())
    if _num_vertices(len(rules), len(resources)) <= _MOST_VERTICES:
        found = _best_vertex(matrix / scale)
    else:
        try:
            from scipy.optimize import linprog
        except ImportError:
            return f"{len(rules)} rules need scipy: pip install 'gnnsys[plan]'"
        found = _by_program(matrix / scale, linprog)
    shares = np.clip(found, 0.0, None)
    shares /= shares.sum()
    busy = matrix @ shares
    binding = tuple(r for r, seconds in zip(resources, busy, strict=True) if seconds >= busy.max() - _SLACK * scale)
    return RuleShares(float(busy.max()), dict(zip(rules, shares.tolist(), strict=True)), binding)


def _num_vertices(num_rules: int, num_resources: int) -> int:
    def choose(n: int, k: int) -> int:
        return int(np.prod([(n - i) / (i + 1) for i in range(k)]).round())

    most = min(num_rules, num_resources)
    return sum(choose(num_rules, k) * choose(num_resources, k) for k in range(1, most + 1))


def _best_vertex(matrix: np.ndarray) -> np.ndarray:
    """The best of all basic solutions: k rules have shares, k resources are busy until t, k + 1 equations for as many
    unknowns. An optimum is a mix of such vertices, so the best of them is one.
    """
    num_resources, num_rules = matrix.shape
    best, least = np.zeros(num_rules), (np.inf, np.inf)
    works = matrix.sum(axis=0)
    for k in range(1, min(num_rules, num_resources) + 1):
        of_rules = np.array(list(combinations(range(num_rules), k)))
        for rows in combinations(range(num_resources), k):
            systems = np.zeros((len(of_rules), k + 1, k + 1))
            systems[:, :k, :k] = matrix[list(rows)][:, of_rules].transpose(1, 0, 2)
            systems[:, :k, k], systems[:, k, :k] = -1.0, 1.0
            is_regular = np.linalg.det(systems) != 0  # nearly singular ones give shares that are looked at as any
            right = np.zeros((k + 1, 1))
            right[k] = 1.0
            solved = np.linalg.solve(systems[is_regular], right)[:, :k, 0]
            shares = np.zeros((len(solved), num_rules))
            np.put_along_axis(shares, of_rules[is_regular], solved, axis=1)
            shares = np.clip(shares[np.isfinite(shares).all(axis=1) & (shares >= -_SLACK).all(axis=1)], 0.0, None)
            shares = shares[shares.sum(axis=1) > 0]
            shares /= shares.sum(axis=1, keepdims=True)
            if len(shares):
                seconds = (shares @ matrix.T).max(axis=1)
                nearly = seconds <= seconds.min() + _SLACK
                at = int(np.flatnonzero(nearly)[(shares[nearly] @ works).argmin()])
                found = (float(seconds[at]), float(shares[at] @ works))  # of equals the one that does least in all
                if found[0] < least[0] - _SLACK or (found[0] < least[0] + _SLACK and found[1] < least[1] - _SLACK):
                    best, least = shares[at], found
    return best


def _by_program(matrix: np.ndarray, linprog: object) -> np.ndarray:
    num_resources, num_rules = matrix.shape
    assert callable(linprog)
    solved = linprog(
        np.append(np.zeros(num_rules), 1.0),
        A_ub=np.hstack([matrix, -np.ones((num_resources, 1))]),
        b_ub=np.zeros(num_resources),
        A_eq=np.append(np.ones(num_rules), 0.0)[None],
        b_eq=np.ones(1),
        method="highs",
    )
    assert solved.status == 0, solved.message  # feasible and bounded by what it is
    return np.asarray(solved.x[:num_rules])


def round_shares(shares: Mapping[str, float], longest: int = 8) -> tuple[str, ...]:
    """A pattern of rules by batch index, no longer than `longest`, whose counts are nearest to the shares.

    Of patterns that are equally near the shortest. Each rule is spread evenly over it.

    >>> round_shares({"bus": 0.62, "cores": 0.38})
    ('bus', 'cores', 'bus', 'bus', 'cores', 'bus', 'cores', 'bus')
    """
    if longest < 1:
        raise ValueError(f"a pattern has a batch, at least, got longest={longest}")
    total = sum(shares.values())
    if not shares or any(share < 0 for share in shares.values()) or not 0 < total < float("inf"):
        raise ValueError(f"shares are numbers of 0 or more, and not all 0, got {dict(shares)}")
    wanted = {rule: share / total for rule, share in shares.items()}
    best: dict[str, int] = {}
    least = float("inf")
    for length in range(1, longest + 1):
        counts = _largest_remainders(wanted, length)
        error = sum(abs(counts[rule] / length - share) for rule, share in wanted.items())
        if error < least - _SLACK:
            best, least = counts, error
    return _spread(best)


def _largest_remainders(wanted: Mapping[str, float], length: int) -> dict[str, int]:
    counts = {rule: int(share * length + _SLACK) for rule, share in wanted.items()}
    by_remainder = sorted(wanted, key=lambda rule: counts[rule] - wanted[rule] * length)  # stable
    for rule in by_remainder[: length - sum(counts.values())]:
        counts[rule] += 1
    return counts


def _spread(counts: Mapping[str, int]) -> tuple[str, ...]:
    """Whoever has waited longest for its share is next, as Bresenham's line goes up where it is most below."""
    length = sum(counts.values())
    waited = dict.fromkeys(counts, 0)
    pattern = []
    for _ in range(length):
        for rule, count in counts.items():
            waited[rule] += count
        rule = max(waited, key=lambda one: waited[one])
        waited[rule] -= length
        pattern.append(rule)
    return tuple(pattern)
