"""A batch's way through a loader, from its ticket to what the user gets: stages that `StageLayout` gives threads.

They must not refer to the loader: threads hold the stages, and would keep it alive.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from gnnsys.loader.batches_elsewhere import AskedBatch, BatchesElsewhere
from gnnsys.loader.fetch import Fetch
from gnnsys.loader.first_products import FirstProducts
from gnnsys.loader.first_sums import FirstSums
from gnnsys.loader.sampled import Compact, Inputs, Sampled
from gnnsys.loader.schedule import Schedule, Ticket
from gnnsys.observe import BatchTrace, Trace
from gnnsys.pipeline import Stage
from gnnsys.sampling import AnyGraph, Sampler


def batch_stages(
    graph: AnyGraph, schedule: Schedule, sample: Callable[[Ticket, Tensor], Sampled], fetch: Fetch,
    ahead: FirstSums | FirstProducts | None, *, trace: Trace | None, device_name: str, sampler: Sampler | None,
    elsewhere: BatchesElsewhere | None = None,
) -> list[Stage]:  # fmt: skip
    """Schedule, sample, fetch and compact; `ahead` makes what the first layer takes, before rows are fetched.

    With `trace` every batch leaves a record. `sampler` chooses the columns that are read, where it does. Where
    there is `elsewhere`, other processes sample and fetch.
    """

    def choose(ticket: Ticket) -> Inputs:
        chosen = schedule.inputs(ticket)
        if trace is None:
            return Inputs(ticket, chosen, None)
        number = schedule.position(ticket)
        record = BatchTrace(ticket.epoch, number, device=device_name, num_seeds=chosen.numel())
        trace.start(number, record)
        return Inputs(ticket, chosen, record)

    def sample_inputs(inputs: Inputs) -> Sampled:
        return described(inputs, sample(inputs.ticket, inputs.chosen))

    def described(inputs: Inputs, sampled: Sampled) -> Sampled:
        sampled.position = max(-1, schedule.position(inputs.ticket))
        if sampler is not None:
            sampled.columns = sampler.columns_at(inputs.ticket)
        if inputs.trace is not None:
            sampled.trace = inputs.trace
            _describe(sampled, inputs.trace)
        return sampled

    def timed(name: str, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return run if trace is None else partial(_note_cpu, name, run)

    begin = None if fetch.is_in_memory else timed("fetch", fetch.begin)
    sampling = Stage("sample", timed("sample", sample_inputs), threads=0)
    if elsewhere is not None:

        def take(asked: AskedBatch) -> Sampled:
            return described(asked.inputs, elsewhere.take(asked))

        sampling = Stage("sample", timed("sample", take), threads=0, begin=elsewhere.ask, counts=elsewhere.counts)
    return [
        Stage("schedule", choose, threads=0),
        sampling,
        *([] if ahead is None else [Stage("aggregate", ahead.run, threads=0)]),
        Stage("fetch", timed("fetch", fetch.finish), threads=0, begin=begin, counts=fetch.counts),
        Stage("compact", timed("compact", Compact(graph)), threads=0),
    ]


def _note_cpu(stage: str, run: Callable[[Any], Any], item: Any) -> Any:
    """Runs a stage and adds what this thread has used of a core to the batch's record."""
    record: BatchTrace | None = item.trace
    began = time.thread_time()
    made = run(item)
    if record is not None:
        record.add_cpu(stage, time.thread_time() - began)
    return made


def _describe(sampled: Sampled, record: BatchTrace) -> None:
    """Nodes and edges per hop, into the batch's record; in all where a sample does not say what was found when."""
    sample = sampled.sample
    record.nodes = sample.num_sampled_nodes
    if len(record.nodes) < len(sample.node):
        record.nodes = {t: [ids.numel()] for t, ids in sample.node.items()} | record.nodes
    edges = sample.num_sampled_edges
    if not edges.keys() >= sample.row.keys():
        edges = {t: [row.numel()] for t, row in sample.row.items()} | edges
    record.edges = {"|".join(t): counts for t, counts in edges.items()}
