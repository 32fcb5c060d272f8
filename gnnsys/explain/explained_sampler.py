"""The sampler of a loader that has a guide: guided draws whose versions come from the model that is being trained.

`update`, after each step, hands weights to the explaining process and takes the masks that have come. A version is
begun when every owner has its scores. Nothing waits, unless the guide is exact: then a version begins at a fixed batch.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from gnnsys.explain.explaining import Explaining, check_guided, remote_ids
from gnnsys.explain.guide import NOT_DECIDING
from gnnsys.explain.mask_reader import MaskBoard, MaskReader
from gnnsys.explain.masks import Masks, masks_from_arrays, masks_to_arrays
from gnnsys.explain.record import load_record, save_record
from gnnsys.explain.weights import check_layout, layout_of, plain_model
from gnnsys.graph import EdgeType, NodeType
from gnnsys.loader import BatchNumbers
from gnnsys.sampling import DistGraph, GuidedSampler, NodeScores, Sample, SampleKey, main_part
from gnnsys.store import ColumnChoice

if TYPE_CHECKING:
    from gnnsys.comm import Pending
    from gnnsys.explain.guide import Guide

_log = logging.getLogger(__name__)
_STATE = "explained"


class _Offer(NamedTuple):
    """A version that owners are being told of."""

    masks: Masks
    scores: NodeScores | None
    choice: ColumnChoice | None
    sent: Sequence[Pending]


class ExplainedSampler(GuidedSampler):
    """Made by `Guide.make_sampler`. The requester is the part that owns most of `seeds` (global ids).

    The first trainer of a machine explains, for all parts of the machine where there are other trainers; these read
    the masks. `batches` tells numbers and positions of batches from each other.
    """

    def __init__(
        self, graph: DistGraph, num_neighbors: Any, guide: Guide, *, seeds: Tensor, batches: BatchNumbers
    ) -> None:
        check_guided(graph, guide)
        self._guide, self._batches = guide, batches
        requester = main_part(graph, seeds) if seeds.numel() else None
        super().__init__(
            graph, num_neighbors, requester=requester, deviation=guide.eps, features=guide.features, fill=guide.fill
        )
        if self.requester not in graph.parts_here:
            raise ValueError(
                f"most seeds of this trainer are of part {self.requester}, which is on machine "
                f"{graph.machine_of_part[self.requester]}, and a guide reads it: give trainers the seeds of their own "
                "machine, as gnnsys.split does"
            )
        self._made = guide.make_model()  # ValueError where there is none
        self._is_checked = False  # whether it is the one that is trained
        if guide.num_features < 1:
            self.choice(torch.zeros(1, dtype=torch.int64, device="cpu"))  # what is left out becomes: read once, and now
        self._is_lead, self._parts_explained, self._board = _who_explains(graph, self.requester, guide.digest())
        self._explaining: Explaining | None = None
        self._reader: MaskReader | None = None
        self._number = -1  # of the newest batch that the trainer has
        self._newest: Masks | None = None  # that came
        self._waited_for: int | None = None  # exact: the batch number whose weights are being explained
        self._given = -1  # the batch number whose weights were handed over last
        self._settling = threading.Lock()
        self._rounds = 0
        self._offer: _Offer | None = None
        self._scores_bytes = 0
        self._drawn = {False: [0, 0], True: [0, 0]}  # by whether batches were guided: batches, nodes of other parts
        self._is_closed = False
        self._keeps_all = guide.record or guide.replay is not None
        self._replayed_to: tuple[int, int] | None = None  # the last batch that a record speaks of
        self.fetched: Callable[[], Mapping[str, int]] = dict  # what the loader's fetch stage counts
        self._made_of: Callable[[], Mapping[str, Any]] = dict  # what that loader is
        self.is_watched = False  # whether it was made
        graph.guides.add(self)

    def options(self) -> dict[str, Any]:
        decides = self._guide.options() if self._guide.exact else {}
        own = {f"guide.{name}": value for name, value in decides.items() if name not in NOT_DECIDING}
        return {**super().options(), **own}

    def watch(self, counts: Callable[[], Mapping[str, int]], made_of: Callable[[], Mapping[str, Any]]) -> None:
        """See `Guide.watch`. A replay begins here: only now it is known whether the record is of such a loader."""
        self.fetched, self._made_of = counts, made_of
        if self._guide.replay is not None:
            self._replay(self._guide.replay)
        self.is_watched = True

    # -- after each step -----------------------------------------------------------------------------------------------

    def update(self, model: nn.Module) -> None:
        """See `Guide.update`."""
        if self._is_closed:
            raise ValueError("this guide is closed: make another, and a loader with it")
        if not self._is_checked:
            check_layout(layout_of(plain_model(model)), layout_of(self._made), self._guide.model)
            self._is_checked = True
        if self._replayed_to is not None:
            return
        self.start()
        if self._guide.exact:
            self._update_exactly(model)
            return
        self._hand_over(model)
        masks = self._take()
        if masks is not None:
            self._newest, self._offer = masks, self._make_offer(masks)
        if self._offer is not None and all(pending.done() for pending in self._offer.sent):
            offer, self._offer = self._offer, None
            try:
                for pending in offer.sent:
                    pending.result()
            except Exception as error:  # of a machine that is lost, say: who samples hears of it there
                _log.warning("version %s of masks is not used: %s", offer.masks.version, error)
                return
            self.begin_version(offer.scores, offer.choice)

    def _update_exactly(self, model: nn.Module) -> None:
        """Masks of the weights of batch n begin at n + every + ahead, which nobody has begun where they are awaited."""
        if self._number < 0 or self._number % self._guide.every or self._number == self._given:
            return
        self._settle()
        self._hand_over(model)
        self._waited_for = self._number

    def _settle(self, before: tuple[int, int] | None = None) -> None:
        """Waits for the masks that are being made, and has them used from where they begin on.

        Threads that sample do it if they begin at or after that, `before` this batch: an epoch was left early.
        """
        if self._waited_for is None:
            return
        with self._settling:
            if self._waited_for is None or self._is_closed:
                return
            begins = self._batches.ticket(self._waited_for + self._guide.every + self._guide.ahead)
            if before is not None and before < tuple(begins):
                return
            try:
                masks = self._wait(self._waited_for)
            except Exception as error:
                if not self._is_closed:
                    raise
                _log.info("the guide was closed while masks were awaited; batches stay as they are guided: %s", error)
                return
            offer = self._make_offer(masks)
            if offer is not None:
                for pending in offer.sent:
                    pending.result()
                self._begin_exactly(offer, (begins[0], begins[1]))
            self._newest, self._waited_for = masks, None

    def _begin_exactly(self, offer: _Offer, position: tuple[int, int]) -> None:
        try:
            self.begin_version(offer.scores, offer.choice, position)
        except ValueError as error:
            raise ValueError(
                f"ahead={self._guide.ahead} is less than the batches that the loader has in flight: give the guide more"
            ) from error

    def _hand_over(self, model: nn.Module) -> None:
        if self._explaining is None:
            self._given = self._number  # the machine's first trainer does
            return
        if self._explaining.give(model, max(0, self._number)):
            self._given, self._rounds = self._number, self._rounds + 1

    def _make_offer(self, masks: Masks) -> _Offer | None:
        """Tells owners of scores; None where batches are guided so already."""
        guide, newest = self._guide, self.newest
        choice = None
        if guide.num_features < 1:
            current = None if newest.columns is None else newest.columns.columns
            columns = masks.better_columns(guide.num_features, current, guide.column_gain)
            choice = newest.columns if columns is current else self.choice(columns)
        scores = masks.node_scores() if guide.nodes else None
        last = self._scores.get(newest.scores)
        if scores is not None and last is not None and torch.equal(last.ids, scores.ids):
            scores = replace(scores, ids=last.ids)  # kept once, however many versions are kept
        if newest.scores == (0 if scores is None else scores.version) and newest.columns is choice:
            return None
        sent = [] if scores is None else self._parts.begin_scores(scores)
        if scores is not None:
            self._scores_bytes += len(sent) * sum(array.nbytes for array in scores.to_arrays())
        return _Offer(masks, scores, choice, sent)

    # -- masks ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the process, where this trainer does, and says where its masks are. Idempotent.

        Done when the first batch is there: by then a state was loaded, if there is one, and no loader refused.
        """
        if self._explaining is not None or not self._is_lead or self._is_closed or self._replayed_to is not None:
            return
        try:
            self._explaining = Explaining(
                self._parts, self._made, self._guide, parts=self._parts_explained, before=self._before(),
                rounds=self._rounds,
            )  # fmt: skip
        except (OSError, ValueError, MemoryError) as error:  # no shared memory is to be had, say
            if self._guide.exact:
                raise
            _log.warning("explanation cannot begin: %s; training goes on without masks", error)
            self._is_lead = False
            return
        if self._board is not None:
            self._board.tell(self._explaining.addresses())

    def _before(self) -> dict[int, Masks]:
        """What rounds to come add to."""
        return {} if self._newest is None else {self.requester: self._newest}

    def _take(self) -> Masks | None:
        """The newest masks of this part that were not taken before."""
        source = self._explaining or self._reader
        newest = None
        while source is not None and (masks := source.take()) is not None:
            if masks.requester == self.requester:
                newest = masks
        if newest is None and self._explaining is None:
            self._find_reader()
        return newest

    def _wait(self, position: int) -> Masks:
        if self._explaining is not None:
            found = self._explaining.wait(position, self._guide.timeout)
            return next(masks for masks in found if masks.requester == self.requester)
        deadline = time.monotonic() + self._guide.timeout
        while True:
            if self._reader is not None and (masks := self._reader.at(self.requester, position)) is not None:
                return masks
            if self._is_closed:
                raise ValueError("this guide was closed while masks were awaited: make another, and a loader with it")
            self._find_reader()
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"no masks of part {self.requester} for batch {position} within {self._guide.timeout:g} s: the "
                    "machine's first trainer explains, see what it says"
                )
            time.sleep(0.005)  # nothing wakes this process when another one writes masks

    def _find_reader(self) -> None:
        """Reads what the machine's first trainer has explained, once it has said where that is.

        What it explains is elsewhere after it has loaded a state, or another process has taken its place.
        """
        if self._reader is not None and self._reader.is_left:
            self._reader = None
        if self._reader is None and self._board is not None:
            self._reader = self._board.find(self.requester, self._before())

    # -- batches -------------------------------------------------------------------------------------------------------

    def sample(
        self,
        seeds: Mapping[NodeType, Tensor],
        *,
        key: SampleKey,
        seed_time: Mapping[NodeType, Tensor] | None = None,
        tree: Mapping[NodeType, Tensor] | None = None,
        exclude: Mapping[EdgeType, Tensor] | None = None,
    ) -> Sample:
        self._settle((key.epoch, key.batch))
        sample = super().sample(seeds, key=key, seed_time=seed_time, tree=tree, exclude=exclude)
        (ids,) = sample.node.values()
        own = self._parts.book.part_range(self.requester, next(iter(sample.node)))
        drawn = self._drawn[self.version_at((key.epoch, key.batch)) != 0]
        with self._lock:
            drawn[0] += 1
            drawn[1] += int(((ids < own.start) | (ids >= own.stop)).sum())
        return sample

    def consumed(self, position: tuple[int, int]) -> None:
        if self._replayed_to is not None and position > self._replayed_to:
            raise ValueError(
                f"the record that is replayed ends with epoch {self._replayed_to[0]}, batch {self._replayed_to[1]}: to "
                "go on, load this loader's state into one whose guide has no replay; or record a longer run"
            )
        super().consumed(position)
        self._number = self._batches.number(position)
        self.start()

    # -- records -------------------------------------------------------------------------------------------------------

    def save_record(self, folder: str | os.PathLike[str]) -> Path:
        """See `Guide.save_record`."""
        if not self._keeps_all or self._is_pruned:
            raise ValueError(
                "versions of the past are forgotten: make the guide with record=True, from the first batch"
            )
        with self._lock:
            end = self._begun if self._replayed_to is None else self._replayed_to
        rank, world_size = _rank(self._parts)
        told = {"rank": rank, "world_size": world_size, "options": self._recorded_of(), "end": list(end)}
        return save_record(folder, {**told, "sampler": super().state_dict()})

    def _replay(self, folder: str | os.PathLike[str]) -> None:
        """Has batches guided as they were in the run that was recorded."""
        record = load_record(folder, *_rank(self._parts), self._recorded_of())
        versions, scores = self.read_state(record["sampler"])
        self.set_versions(versions, scores, is_pruned=False)  # owners ask for scores that they lack
        self._replayed_to = (int(record["end"][0]), int(record["end"][1]))

    def _recorded_of(self) -> dict[str, Any]:
        """What decides which batch (epoch, batch) is and how it is drawn; not the guide: its versions are recorded."""
        made_of = dict(self._made_of())
        of_loader = {
            name: value for name, value in made_of.pop("sampling", {}).items() if not name.startswith("guide.")
        }
        return {**super().options(), **of_loader, **made_of, **self._batches.state()}

    # -- state and end -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Where the guide is exact, this waits for masks that are being made: they are part of the state."""
        if self._guide.exact and self._number >= 0:
            if self._number % self._guide.every == 0 and self._number != self._given:
                raise ValueError(
                    f"the weights of batch {self._number} were not handed over: call guide.update(model) after each "
                    "step, before a checkpoint is saved"
                )
            self._settle()
        newest = [] if self._newest is None else masks_to_arrays(self._newest)
        own = {"masks": newest, "rounds": self._rounds, "given": self._given}
        return {**super().state_dict(), _STATE: own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Also of a `GuidedSampler` that nobody has explained for."""
        newest, rounds, given = self._read_own(state.get(_STATE, {"masks": [], "rounds": 0, "given": -1}))
        versions = {name: value for name, value in state.items() if name != _STATE}
        if self._replayed_to is not None:
            self._check_recorded(versions)
            return
        super().load_state_dict(versions)
        self._forget()
        self._newest, self._given = newest, given
        self._rounds = max(rounds, 0 if newest is None else newest.version)  # also of a trainer that only read

    def _read_own(self, own: Mapping[str, Any]) -> tuple[Masks | None, int, int]:
        """What the state has besides versions; ValueError where it is not of this part or was altered."""
        try:
            newest = masks_from_arrays(own["masks"]) if own["masks"] else None
            rounds, given = int(own["rounds"]), int(own["given"])
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this state of a guide was altered: {error!r}") from error
        if newest is not None:
            table = self._parts.node_data[self._parts.node_types[0]][self.features]
            known = remote_ids(self._parts, self.requester)
            if newest.requester != self.requester or newest.sf.numel() != table.shape[1]:
                raise ValueError(
                    f"this state has masks of part {newest.requester} with {newest.sf.numel()} columns, here part "
                    f"{self.requester} has {table.shape[1]}: it is of another graph"
                )
            if not bool(torch.isin(newest.ids, known).all()):
                raise ValueError("this state has masks of nodes that this part has no edges from: it is of other parts")
        return newest, rounds, given

    def _check_recorded(self, state: Mapping[str, Any]) -> None:
        """ValueError unless the state is of the run that is replayed, which has all that the state has."""
        found, _ = self.read_state(state)
        with self._lock:
            recorded = {(each.position, each.scores, each.columns and each.columns.key) for each in self._versions}
        if any((each.position, each.scores, each.columns and each.columns.key) not in recorded for each in found):
            raise ValueError(
                f"this state is not of the run that replay={os.fspath(self._guide.replay or '')!r} has recorded, or of "
                "a time after its end: load it into a loader whose guide has no replay"
            )

    def begin_anew(self) -> None:
        if self._replayed_to is not None:
            raise ValueError("these states are of another number of trainers: a record is replayed with as many")
        super().begin_anew()
        self._forget()

    def _forget(self) -> None:
        """What was under way is of no use to a run that goes on elsewhere."""
        if self._explaining is not None:
            self._explaining.close()
        self._explaining, self._reader, self._offer, self._newest = None, None, None, None
        self._waited_for, self._given, self._rounds = None, -1, 0

    def status(self) -> dict[str, float]:
        """Of the explaining process (`Explaining.counters`), of the version in force, and what it saves."""
        told = {} if self._explaining is None else self._explaining.counters()
        version, newest = self.newest, self._newest
        (batches, nodes), (guided, of_guided) = self._drawn[False], self._drawn[True]
        width = self._parts.node_data[self._parts.node_types[0]][self.features]
        row_bytes = width.shape[1] * width.dtype.itemsize
        saved = (nodes / batches * guided - of_guided) * row_bytes if batches and guided else 0.0
        return {
            **told,
            "age": -1 if newest is None else self._number - newest.position,
            "begins_at": -1 if version.position[0] < 0 else self._batches.number(version.position),
            "num_columns": width.shape[1] if version.columns is None else version.columns.columns.numel(),
            "guided_batches": guided,
            "bytes_saved_by_nodes": saved,
            "bytes_saved_by_columns": self.fetched().get("bytes_left_out", 0),
            "score_bytes": self._scores_bytes,
        }

    def close(self) -> None:
        """Ends the explaining process. Idempotent."""
        self._is_closed = True
        if self._explaining is not None:
            self._explaining.close()


def _rank(graph: DistGraph) -> tuple[int, int]:
    """This trainer's number, and how many there are."""
    return (0, 1) if graph.placement is None else (graph.placement.rank, graph.placement.world_size)


def _who_explains(graph: DistGraph, requester: int, digest: int) -> tuple[bool, list[int], MaskBoard | None]:
    """Whether this trainer does, for which parts, and where others are told of the masks."""
    placement = graph.placement
    machines = (0,) if placement is None else placement.machine_of_rank
    rank = 0 if placement is None else placement.rank
    here = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    if len(here) == 1:
        return True, [requester], None
    return rank == here[0], list(graph.parts_here), MaskBoard(graph, digest)
