"""What a pass over the graph has: the rows of every layer, how a bin goes through its stage, what is kept of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gnnsys.fullgraph.keyed_dropout import KeyedRows
from gnnsys.fullgraph.offload.mover import BroughtInputs, Mover, Pick, csc_of, csc_picks, picked
from gnnsys.fullgraph.offload.source_sweeps import DeviceSums
from gnnsys.fullgraph.plan.bins import Bin
from gnnsys.fullgraph.plan.pass_planner import PassPlan
from gnnsys.fullgraph.plan.stage_halves import SumStage
from gnnsys.fullgraph.plan.step_plan import Step
from gnnsys.fullgraph.run.batch_norm import NormPass
from gnnsys.fullgraph.run.constant_sums import ConstantSums
from gnnsys.fullgraph.run.module_snapshot import ModuleSnapshot
from gnnsys.fullgraph.run.pass_times import PassClock, Times
from gnnsys.ops import CSC


@dataclass(eq=False)
class BinInputs:
    """What a bin is computed from, on the device; `loads` are what brought it, where something did.

    Of a stage in halves the inputs are sums, and where rows move `scale` is what those were multiplied by.
    """

    inputs: Tensor
    joined: list[Tensor]
    own: Tensor | None = None
    scale: Tensor | None = None  # of the rows it reads
    csc: CSC | None = None
    loads: list[BroughtInputs] = field(default_factory=list)


@dataclass(eq=False)
class KeptBin:
    """A bin's inputs and result, still joined by autograd. Of a stage in halves the inputs are sums and own rows."""

    inputs: Tensor
    joined: list[Tensor]
    out: Tensor
    own: Tensor | None = None
    loads: list[BroughtInputs] = field(default_factory=list)
    dst_scale: Tensor | None = None  # of the sums


@dataclass(eq=False)
class Pass:
    """`rows[s]` is what step s reads (core, then halo where it has neighbours), `rows[-1]` the result.

    `needs[s]` says whether rows[s] depend on something that trains; `marks` which rows a name in the list of layers
    means; `scales[s]`, where it is there, a factor for each row of step s's input, which bins multiply what they read
    of it by; those rows need no gradient.
    """

    plan: PassPlan
    key: int
    wants_grad: bool
    rows: list[Tensor] = field(default_factory=list)
    needs: list[bool] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    parameters: list[list[nn.Parameter]] = field(default_factory=list)  # of each step, as they were when it began
    scales: dict[int, Tensor] = field(default_factory=dict)  # [num_rows, 1]
    norms: dict[int, NormPass] = field(default_factory=dict)
    times: Times = field(default_factory=Times)
    is_known: bool = False  # whether the input, with its halo, is that of an earlier pass
    constant: ConstantSums | None = None  # of the first step's nodes, where x stays the same and they are kept
    keeps_sums: bool = True  # whether they may be
    clock: PassClock | None = None  # where it is measured what the pass takes
    mover: Mover | None = None
    device_sums: dict[int, DeviceSums] = field(default_factory=dict)  # by step in sweeps: of the group at work
    _kept: dict[Bin, KeptBin] = field(default_factory=dict)
    _kept_sums: dict[tuple[int, int], DeviceSums] = field(default_factory=dict)  # of bins that are kept, by group
    _random: dict[Bin, Any] = field(default_factory=dict)
    _autocast: Callable[[], Any] = contextlib.nullcontext
    _snapshot: ModuleSnapshot | None = None  # modules on the way there, where bins are computed again

    def __post_init__(self) -> None:
        self.mover = None if self.plan.buffers is None else Mover(self.plan.buffers)

    def begin(self, x: Tensor) -> None:
        """Makes room for the rows of every layer, of which x is the first."""
        plan, steps = self.plan, self.plan.steps
        self.rows = [x.detach()]
        self._autocast = _autocast_state(plan.device.type)
        self.marks = {name: index for index, step in enumerate(steps) for name in step.stage.keep_as}
        self.needs = [self.wants_grad and x.requires_grad]
        for step in steps:
            step.stage.look()
        self.parameters = [step.stage.parameters() for step in steps]
        if self.wants_grad and plan.recompute:
            self._snapshot = ModuleSnapshot([step.stage for step in steps])
        for index, step in enumerate(steps):
            self.needs.append(self.needs[-1] or (self.wants_grad and bool(self.parameters[index])))
            is_read = index + 1 < len(steps) and steps[index + 1].has_halo
            num_rows = plan.halo.num_local if is_read else plan.halo.num_core
            # In place the result of a step's one bin will be all of it
            whole = len(step.bins) == 1 and len(step.bins[0]) == num_rows and self.mover is None
            self.rows.append(self.host_rows((0 if whole else num_rows, step.width), step.dtype, x.device))

    def host_rows(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Room for rows where they live, which holds anything yet; where bins move copies go there directly."""
        buffers = self.plan.buffers
        return torch.empty(shape, dtype=dtype, device=device) if buffers is None else buffers.streams.rows(shape, dtype)

    def begin_back(self) -> None:
        """Raises RuntimeError where something that the way back reads is not what it was on the way there."""
        for norm in self.norms.values():
            norm.check()
        if self._snapshot is not None:
            self._snapshot.check()

    def step_of(self, here: Bin) -> Step:
        return self.plan.steps[here.step]

    def load(self, here: Bin, grads: Sequence[Tensor] | None = None) -> None:
        """Begins to bring what a bin is computed from, where bins move; on the way back `grads` are parts of its
        gradient. The first bin of a group has the sums of all of them made before."""
        if self.mover is None:
            return
        s, step = here.step, self.step_of(here)
        is_read = grads is None or self.plan.recompute or step.stage.norm is not None
        if is_read and step.source_sweeps is not None and self._known_sums(here) is None:
            self._sweep(here)
        picks = self._picks(here) if is_read else []
        self.mover.load(here, picks if grads is None else [*map(Pick, grads), *picks])
        if is_read and step.piecewise_sums is not None and self._known_sums(here) is None:
            step.piecewise_sums.load(self.mover, here, 0, self.rows[s], self.scales.get(s))

    def _sweep(self, here: Bin) -> None:
        """Makes the sums of a bin's group, unless they are there."""
        s, sweeps = here.step, self.step_of(here).source_sweeps
        assert sweeps is not None and self.mover is not None
        group = sweeps.groups[sweeps.group_of[here.number]]
        if s in self.device_sums and self.device_sums[s].group is group:
            return
        self.mover.finish()
        self.device_sums.pop(s, None)
        began, waited = time.perf_counter(), self.mover.seconds  # which is counted when the pass ends
        self.device_sums[s] = sweeps.sums(self.mover, group, self.rows[s], self.scales.get(s), self.plan.device)
        self.mover.finish()
        self.times.compute += time.perf_counter() - began - (self.mover.seconds - waited)

    def leave_sums(self, here: Bin) -> bool:
        """A bin has read its sums; whether it was the last of its group."""
        sums = self.device_sums.get(here.step)
        if sums is None:
            return False
        sums.bins_left -= 1
        return sums.bins_left == 0

    def compute(self, here: Bin, done: Callable[[], None]) -> None:
        """A bin on the way there. Its rows are there when this returns or, where bins move, when it calls `done`."""
        s, step = here.step, self.step_of(here)
        if step.stage.norm is not None:
            if s not in self.norms:  # the first of its bins
                self.norms[s] = NormPass(step.stage.norm, self.plan.peers)
                self.norms[s].begin(self.core(s), step.bounds, self.plan.device)
            (x,), loads = self.taken(here)
            self._return(here, self.norms[s].forward(x), done, loads)
            return
        keeps = self.needs[s + 1] and not self.plan.recompute
        if self.needs[s + 1] and not keeps:
            self._random[here] = _random_state(self.plan.device)
        with torch.set_grad_enabled(keeps):
            load = None if self.mover is None else self.mover.take(here)
            kept = self._evaluate(here, self._given(here) if load is None else self._brought(here, load, load.tensors))
        if keeps:
            self._kept[here] = kept
        if step.source_sweeps is not None and self.leave_sums(here):
            last = self.device_sums.pop(s)
            if keeps and self.needs[s]:
                self._kept_sums[s, last.group.number] = last
        is_new = self.mover is not None and self._stays(here) and self._known_sums(here) is None
        self._return(here, kept.out.detach(), done, kept.loads, kept.inputs if is_new else None)

    def _return(
        self,
        here: Bin,
        out: Tensor,
        done: Callable[[], None],
        loads: Sequence[BroughtInputs] = (),
        sums: Tensor | None = None,
    ) -> None:
        """The rows that a bin made, to where they live, and its sums where those will be the same again."""
        if self.mover is None:
            self._put(here, out)
            return

        into: list[Tensor | None] = [self.rows[here.step + 1][here.nodes]]
        known: Tensor | None = None
        if sums is not None and self.constant is not None:
            with torch.inference_mode(False):
                known = self.constant.room(
                    here, lambda num: self.host_rows((num, sums.shape[1]), sums.dtype, self.rows[0].device)
                )
            into.append(known)

        def arrived(came: Sequence[Tensor]) -> None:
            if known is not None and self.constant is not None:
                self.constant.made(here)
            done()

        results = [out] if sums is None or known is None else [out, sums]
        self.mover.send_back(results, arrived, loads, into=into)

    def _stays(self, here: Bin) -> bool:
        """Whether a bin sums up features that never change."""
        is_linear = isinstance(self.step_of(here).stage, SumStage)
        return here.step == 0 and is_linear and self.constant is not None and 0 not in self.scales

    def _known_sums(self, here: Bin) -> Tensor | None:
        return self.constant.get(here) if self._stays(here) and self.constant is not None else None

    def core(self, s: int) -> Tensor:
        """A step's input without the halo."""
        return self.rows[s][: self.plan.halo.num_core]

    def taken(self, here: Bin) -> tuple[list[Tensor], list[BroughtInputs]]:
        """The rows of a bin's nodes on the device, behind its gradient where that was loaded; and what brought them."""
        if self.mover is None:
            return [self.rows[here.step].data[here.nodes].to(self.plan.device)], []
        load = self.mover.take(here)
        return load.tensors, [load]

    def take_kept(self, here: Bin, num_grads: int = 1) -> tuple[KeptBin, list[Tensor]]:
        """A bin for the way back, as it was kept or computed once more with the same random numbers; and the parts of
        its gradient, where those were loaded."""
        load = None if self.mover is None else self.mover.take(here)
        grads = [] if load is None else load.tensors[:num_grads]
        if not self.plan.recompute:
            kept = self._kept.pop(here)
            kept.loads = [] if load is None else [load]
            return kept, grads
        assert self._snapshot is not None
        with torch.enable_grad(), _replayed(self._random.pop(here)), self._snapshot.again():
            given = self._given(here) if load is None else self._brought(here, load, load.tensors[num_grads:])
            return self._evaluate(here, given), grads

    def sums_of(self, here: Bin) -> DeviceSums:
        """The sums of a bin's group, which its gradient takes the place of; those of bins that were kept are again at
        work."""
        s, sweeps = here.step, self.step_of(here).source_sweeps
        assert sweeps is not None
        if s not in self.device_sums:
            number = sweeps.group_of[here.number]
            self.device_sums[s] = self._kept_sums.pop((s, number))
            self.device_sums[s].bins_left = sweeps.group_of.count(number)
        return self.device_sums[s]

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """Inside it bins may be under way, behind it none is."""
        if self.mover is None:
            yield
            return
        with self.mover:
            yield
        self.times.compute += self.mover.seconds
        self.times.bytes_up += self.mover.bytes_up
        self.times.bytes_down += self.mover.bytes_down
        self.mover.seconds, self.mover.bytes_up, self.mover.bytes_down = 0.0, 0, 0

    def forget(self, s: int) -> None:
        """Rows of a layer that nothing will read again."""
        if not self.wants_grad and s not in self.marks.values():
            self.rows[s] = self.rows[s][:0].clone()

    def _picks(self, here: Bin) -> list[Pick]:
        """What has to be brought for a bin, as `_brought` takes it."""
        s, step = here.step, self.step_of(here)
        picks = [picked(here, self.rows[s])] if self._takes_own(step) else []
        picks += [Pick(self.rows[self.marks[name]], here.nodes) for name in step.stage.joins]
        if isinstance(step.stage, SumStage):
            sums = self._known_sums(here)
            if sums is not None:
                return [*picks, Pick(sums)]
        if step.source_sweeps is not None:
            return picks
        if step.piecewise_sums is not None:
            scale = step.piecewise_sums.dst_scale(self.rows[s].dtype)
            return picks if scale is None else [*picks, Pick(scale, here.nodes)]
        if s in self.scales:
            picks.append(picked(here, self.scales[s]))
        if here.csc is not None and self.plan.brings_structure:
            picks += csc_picks(here.csc)
        return picks

    def _brought(self, here: Bin, load: BroughtInputs, tensors: Sequence[Tensor]) -> BinInputs:
        """What a bin is computed from, where it was brought."""
        s, step = here.step, self.step_of(here)
        left = iter(tensors)
        if step.source_sweeps is not None:
            own = next(left) if self._takes_own(step) else None
            joined = [next(left) for _ in step.stage.joins]
            sums = next(left, None)
            if sums is None:
                sums = self.device_sums[s].of(here.first, here.end)
            return BinInputs(sums, joined, sums.data if own is None else own, loads=[load])
        given = BinInputs(next(left), [next(left) for _ in step.stage.joins], csc=here.csc, loads=[load])
        if step.piecewise_sums is not None:
            assert self.mover is not None
            given.own, given.scale, scale = given.inputs, next(left, None), self.scales.get(s)
            if self._known_sums(here) is not None:
                assert given.scale is not None
                given.inputs, given.scale = given.scale, None
                return given
            given.inputs, loads = step.piecewise_sums.sums(
                self.mover, here, self.rows[s], given.own, scale, given.scale
            )
            given.loads += loads
            return given
        if s in self.scales:
            given.scale = next(left)
        if here.csc is not None and self.plan.brings_structure:
            given.csc = csc_of(here.csc, list(left))
        return given

    @staticmethod
    def _takes_own(step: Step) -> bool:
        """Whether a bin's own rows are read; in sweeps they are not brought for nothing."""
        return step.source_sweeps is None or (isinstance(step.stage, SumStage) and step.stage.takes_own)

    def _given(self, here: Bin) -> BinInputs:
        """What a bin is computed from, where rows lie on the device."""
        s, step, device = here.step, self.step_of(here), self.plan.device
        rows = self.rows[s].data  # others of them may be written meanwhile: autograd shall not count that
        joined = [self.rows[self.marks[name]].data[here.nodes].to(device) for name in step.stage.joins]
        if isinstance(step.stage, SumStage):
            return BinInputs(self._sums(here), joined, rows[here.nodes])
        scale = here.inputs(self.scales[s]).to(device) if s in self.scales else None
        csc = None if here.csc is None else here.csc.to(device)
        return BinInputs(here.inputs(rows).detach().to(device), joined, None, scale, csc)

    def _evaluate(self, here: Bin, given: BinInputs) -> KeptBin:
        """A bin through its stage, under autograd where that is on."""
        s, stage, grads = here.step, self.step_of(here).stage, torch.is_grad_enabled()
        now = KeyedRows(self.plan.ids[here.nodes], self.key)
        for name, marked in zip(stage.joins, given.joined, strict=True):
            marked.requires_grad_(grads and self.needs[self.marks[name]])
        inputs, own, joined = given.inputs.requires_grad_(grads and self.needs[s]), given.own, given.joined
        if isinstance(stage, SumStage):
            assert own is not None
            own.requires_grad_(grads and self.needs[s] and stage.takes_own)
            with self._autocast():
                out = stage.run_sums(inputs, own, joined, now)
            return KeptBin(inputs, joined, out, own, given.loads, given.scale)
        read = inputs
        if given.scale is not None:
            is_copy = here.src is not None or given.loads or inputs.device != self.rows[s].device
            read = inputs.mul_(given.scale) if is_copy else inputs * given.scale
        if stage.conv is None and stage.writes:
            read = read.clone()  # rows are not the modules' to write
        with self._autocast():
            return KeptBin(inputs, joined, stage.run(read, given.csc, joined, now), loads=given.loads)

    def _sums(self, here: Bin) -> Tensor:
        """What a bin's nodes have as in-neighbours; of features that never change they are made once."""
        s, view = here.step, self.step_of(here).neighbor_sums
        assert view is not None
        if s in self.scales:
            return view.sums(self.rows[s], here.first, here.end, self.scales[s][:, 0])
        known = self._known_sums(here)
        if known is None and self._stays(here):
            assert self.constant is not None
            with torch.inference_mode(False), torch.no_grad():
                known = self.constant.put(here, view.sums(self.rows[s], here.first, here.end))
        return view.sums(self.rows[s], here.first, here.end) if known is None else known

    def _put(self, here: Bin, out: Tensor) -> None:
        """The rows of a bin among the inputs of the next step, which they may be all of."""
        s = here.step + 1
        if len(self.rows[s]):
            self.rows[s][here.nodes] = out
        else:
            self.rows[s] = out.to(self.rows[s].device)


def needed_before(needs: Sequence[bool], num_steps: int) -> int:
    """The first step whose result depends on something that trains."""
    return needs.index(True, 1) - 1 if True in needs[1:] else num_steps


def _autocast_state(device_type: str) -> Callable[[], Any]:
    """Makes a context in which autocast is as it is now."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled)


def _random_state(device: torch.device) -> tuple[Tensor, Tensor | None, torch.device]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None, device


@contextlib.contextmanager
def _replayed(state: tuple[Tensor, Tensor | None, torch.device]) -> Iterator[None]:
    """Random numbers as they were when a bin ran first."""
    cpu, cuda, device = state
    with torch.random.fork_rng([device] if cuda is not None else []):
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)
        yield
