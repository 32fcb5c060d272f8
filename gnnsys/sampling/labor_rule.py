"""How LABOR draws (Balin and Catalyurek 2023): LABOR-0, which parts and devices apply by themselves, and LABOR-i."""

from __future__ import annotations

from gnnsys.ops import Neighbors, sample_labor
from gnnsys.sampling.draw_rule import DrawRule, RuleSeeds, RuleSource
from gnnsys.sampling.labor_importance import draw_by_importance

MAX_ROUNDS = 10  # of LABOR-i: probabilities hardly change after three


class LaborRule(DrawRule):
    """LABOR-0: u -> v is taken where r_u < fanout / degree(v). r_u is of the source and the key, so owners agree."""

    name = "labor-0"
    needs_sources = True
    draws_on_devices = drawn_in_hops = True
    weighs = True

    def draw(self, source: RuleSource, seeds: RuleSeeds) -> Neighbors:
        options = {"source_ids": source.source_ids, "exclude": seeds.exclude, "tree": seeds.tree}
        return sample_labor(source.csc, seeds.ids, seeds.fanout, key=seeds.key, **options)


class ImportanceRule(LaborRule):
    """LABOR-i: probabilities of edges come from all seeds of a hop, so one process must have their in-edges."""

    needs_sources = drawn_in_hops = False

    def __init__(self, rounds: int) -> None:
        self.name, self.rounds = f"labor-{rounds}", rounds

    def draw(self, source: RuleSource, seeds: RuleSeeds) -> Neighbors:
        if source.part >= 0:
            raise ValueError(f"{self.name} needs the whole graph in one process: use labor-0 on parts")
        if seeds.fanout <= 0:
            return super().draw(source, seeds)
        return draw_by_importance(
            source.csc, seeds.ids, seeds.fanout, self.rounds, key=seeds.key, exclude=seeds.exclude
        )
