"""Samplers whose inputs are clusters, or numbers of subgraphs, instead of seeds: what a `SubgraphLoader` takes.

A sample is a function of the inputs, the key and what `options` says, and of nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from gnnsys.sampling.neighborhoods import AnyGraph
from gnnsys.sampling.sample import Sample
from gnnsys.sampling.sampler import SampleKey


class SubgraphSampler(ABC):
    """Makes a subgraph of some inputs, numbers in [0, num_inputs). `sample` is called from several threads at once."""

    unbiased_for: ClassVar[str] = ""  # what is exact in expectation over keys, in one sentence; empty: nothing
    gives: ClassVar[tuple[str, ...]] = ()  # "edge_weight", "node_weight": what its batches have besides structure

    graph: AnyGraph
    device: torch.device = torch.device("cpu")  # where samples are made

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """How many inputs an epoch goes through."""

    @abstractmethod
    def sample(self, inputs: Tensor, *, key: SampleKey) -> Sample:
        """The subgraph of `inputs`, int64 on the host."""

    def inputs_by_subpart(self) -> list[int]:
        """How many inputs each subpart has, in their order, where they belong to subparts; else all in one."""
        return [self.num_inputs]

    def check_batch_size(self, batch_size: int) -> None:  # noqa: B027 - most take any
        """ValueError for numbers of inputs that no batch may have."""

    def options(self) -> dict[str, Any]:
        """What decides a sample besides the graph, the inputs and the key, by the names that users give it."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a sampler has learned since it was made; a loader's state carries it. Most have learned nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` gave; ValueError where that is of another sampler."""
        if state:
            raise ValueError(f"this state is of another sampler: {type(self).__name__} learns nothing, got {[*state]}")

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Takes up what the samplers of all ranks had learned, however many they were."""
        self.load_state_dict(states[0])

    def consumed(self, position: tuple[int, int]) -> None:  # noqa: B027 - most do not care
        """A loader has handed out the batch at (epoch, batch): what only batches before it need may be forgotten."""


def check_inputs(inputs: Tensor, num_inputs: int) -> Tensor:
    """As int64; ValueError for inputs that do not exist."""
    if inputs.numel() and not 0 <= int(inputs.min()) <= int(inputs.max()) < num_inputs:
        raise ValueError(f"inputs must be in [0, {num_inputs}), got {int(inputs.min())} to {int(inputs.max())}")
    return inputs.long()
