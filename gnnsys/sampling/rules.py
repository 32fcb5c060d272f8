"""Every rule of drawing by its name: what samplers, views of parts and requests find one by."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gnnsys.graph import some
from gnnsys.sampling.draw_rule import DrawRule
from gnnsys.sampling.guided_rule import GuidedRule
from gnnsys.sampling.labor_rule import MAX_ROUNDS, ImportanceRule, LaborRule

_ALL = (LaborRule(), *(ImportanceRule(rounds) for rounds in range(1, MAX_ROUNDS + 1)), GuidedRule())
RULES: Mapping[str, DrawRule] = MappingProxyType({rule.name: rule for rule in _ALL})


def find_rule(text: str) -> DrawRule:
    """The rule that "name" or "name:options" says; ValueError where there is none."""
    name, _, options = text.partition(":")
    if name not in RULES:
        raise ValueError(f"no rule of drawing is called {name!r}, there are {some(RULES, near=name)}")
    return RULES[name].with_options(options) if options else RULES[name]
