"""Which stages a loader has, in which order, and which of them have threads.

In memory, sampling and fetching are both work for a core: the same threads do all of it for a batch. Where rows come
over a network, sampling threads send a batch's requests as soon as it is sampled and go on with the next; another
thread waits for the rows. Where a device samples and gathers, a thread has little to do but to queue that work, for a
batch from its seeds to its arrival. A user's stages go where they say, with the threads that they say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gnnsys.loader.device_copy import DeviceCopy
from gnnsys.loader.options import PipelineOptions, check_count
from gnnsys.loader.sampled import Sampled
from gnnsys.pipeline import BatchGroup, Stage

PLACES = ("schedule", "sample", "fetch", "compact")  # where a user's stage may follow


@dataclass(frozen=True, kw_only=True)
class StageLayout:
    """The sizes everything follows from: `waits` tells whether sampling or fetching waits for other machines,
    `on_device` whether batches are sampled on the device that they go to; `group_bytes` is what a group of sampled
    batches may take."""

    num_threads: int
    prefetch: int
    waits: bool
    options: PipelineOptions
    on_device: bool = False
    fetch_threads: int = 1  # that wait for rows, where these come over a network
    native_threads: int = 1  # of each loading thread, where it makes sums for a device
    group_bytes: int | None = None
    asks_ahead: int = 0  # batches that others are asked for before they are needed

    def __post_init__(self) -> None:
        check_count("num_threads", self.num_threads, 0)
        if self.options.group and not (self.num_threads and self.options.threads.get("sample", 1)):
            raise ValueError(f"group={self.options.group} needs a thread that samples: num_threads must be at least 1")
        check_count("prefetch", self.prefetch, 1)

    @property
    def sample_depth(self) -> int:
        """Sampled batches whose rows are on their way, besides those in the hands of a thread."""
        return self.options.depths.get("sample", 2 if self.waits else 0)

    @property
    def num_in_flight(self) -> int:
        """How many batches there may be between having been sampled and having their rows."""
        threads = self.options.threads
        sampling = threads.get("sample", self.num_threads)
        return sampling + self.sample_depth + threads.get("fetch", min(self.fetch_threads, self.num_threads)) + 1

    @property
    def num_ahead(self) -> int:
        """Batches whose rows are asked for and not in place, when a thread has sampled another and asks for its rows:
        one in the hands of every other thread, and those that wait behind them, where only room holds them back."""
        sampling = self.options.threads.get("sample", self.num_threads)
        return sampling - 1 + self.sample_depth if self.num_threads and sampling else 0

    @property
    def num_ahead_when_late(self) -> int:
        """The same where rows come late: threads that fetch then wait for a batch each, and else hold one."""
        fetching = self.options.threads.get("fetch", min(self.fetch_threads, self.num_threads))
        return self.num_ahead + fetching if self.num_threads else 0

    @property
    def num_under_way(self) -> int:
        """Batches that are made or wait while one is trained on, where nothing but room holds them back."""
        if not self.num_threads:
            return 0
        fetching = self.options.threads.get("fetch", min(self.fetch_threads, self.num_threads))
        return self.num_ahead + 1 + fetching + self.options.depths.get("fetch", self.prefetch)

    def arrange(
        self,
        ours: Sequence[Stage],
        transform: Callable[[Any], Any] | None,
        user_stages: Sequence[Stage],
        copy: DeviceCopy | None,
    ) -> list[Stage]:
        """`ours` are schedule, sample, aggregate (where sums are made), fetch and compact. A user's function on batches
        runs ahead, in loading threads (and on the host, if that is where batches are made), so compact comes before
        copy if there is one; and where batches are made on the device. Otherwise it comes behind: it is then work of
        the consumer's stream."""
        check_user_stages(user_stages)
        extra = [*user_stages]
        if transform is not None:
            extra.append(Stage("transform", transform, threads=0, after="compact"))
        stages: list[Stage] = []
        for stage in map(_begun_when_run, ours) if self.options.group else ours:
            behind_it = [e for e in extra if e.after == stage.name]
            if stage.name in ("sample", "fetch"):
                behind_it = [replace(e, run=_without_promises(e.run)) for e in behind_it]
            stages += [stage, *behind_it]
        behind: list[Stage] = []
        if copy is not None and stages[-1].name == "compact" and not self.on_device:
            behind = [stages.pop()]
        names = {stage.name for stage in user_stages}
        if copy is None:
            return self._with_threads(stages, names)
        last = Stage("copy", copy.begin, threads=0, native_threads=self.native_threads)
        if self.on_device:
            stages = self._with_threads([*stages, last], names)
            threaded = [stage.name for stage in stages[:-1] if not stage.is_inline]
            if not threaded or (threaded == ["sample"] and not user_stages):
                copy.use_own_streams(hand_over=bool(threaded))
        else:
            threads, depth = self._sizes("copy", min(1, self.num_threads), 1)
            stages = [*self._with_threads(stages, names), replace(last, threads=threads, depth=depth)]
        return [*map(copy.on_stream, stages), Stage("arrive", copy.arrive, threads=0), *behind]

    def _with_threads(self, stages: Sequence[Stage], user_names: set[str]) -> list[Stage]:
        if self.num_threads == 0:
            return [replace(stage, threads=0) for stage in stages]
        out: list[Stage] = []
        for number, stage in enumerate(stages):
            if stage.name in user_names:
                out.append(stage)
                continue
            is_last = number == len(stages) - 1
            before_user = not is_last and stages[number + 1].name in user_names and not stages[number + 1].is_inline
            threads, depth = 0, self.prefetch
            if stage.name == "schedule" and self.asks_ahead:  # its thread asks, as it brings batches to be sampled
                threads, depth = 1, self.asks_ahead
            elif stage.name == "sample" and (self.waits or self.options.group):
                threads, depth = self.num_threads, self.sample_depth
            elif is_last or before_user:
                is_sampled = any(s.name == "sample" and not s.is_inline for s in out)
                threads = self.fetch_threads if self.waits and is_sampled else self.num_threads
            threads, depth = self._sizes(stage.name, threads, depth)
            out.append(replace(stage, threads=threads, depth=depth, group=self._group_behind(stage)))
        return out

    def _group_behind(self, stage: Stage) -> BatchGroup | None:
        if stage.name != "sample" or not self.options.group:
            return None
        return BatchGroup(size=self.options.group, most_bytes=self.group_bytes, num_bytes=_structure_bytes)

    def _sizes(self, name: str, threads: int, depth: int) -> tuple[int, int]:
        return self.options.threads.get(name, threads), self.options.depths.get(name, depth)


def _begun_when_run(stage: Stage) -> Stage:
    """The same without a `begin` of its own: what waits in a group has asked for nothing yet."""
    begin, run = stage.begin, stage.run
    return stage if begin is None else replace(stage, begin=None, run=lambda item: run(begin(item)))


def _structure_bytes(sampled: Sampled) -> int:
    return sum(tensor.nbytes for tensor in sampled.tensors())


def _without_promises(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A user's stage may have changed the edges: what the sampler knew about their order is forgotten."""

    def changed(item: Any) -> Any:
        out = run(item)
        if isinstance(out, Sampled):
            out.sample.by_destination = False
        return out

    return changed


def check_user_stages(stages: Sequence[Stage]) -> None:
    if not isinstance(stages, Sequence):
        raise ValueError(f"stages must be a list of gnnsys.pipeline.Stage, got {type(stages).__name__}")
    for stage in stages:
        if not isinstance(stage, Stage):
            raise ValueError(
                f"stages must be gnnsys.pipeline.Stage, got {type(stage).__name__}: write Stage(name, function, "
                f'after="fetch"), after one of {", ".join(PLACES)}'
            )
        if stage.after not in PLACES:
            raise ValueError(f"stage {stage.name!r}: after must be one of {', '.join(PLACES)}, got {stage.after!r}")
        if stage.name in (*PLACES, "aggregate", "copy", "arrive", "transform"):
            raise ValueError(f"a stage of your own needs a name of its own, {stage.name!r} is one of ours")
