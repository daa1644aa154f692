"""Ranks that share a host state: they average gradients, and wait for each other's updates.

[Note: ranks]
All ranks of a machine share the weights, gradients and optimizer state in host memory. Each pages whole
layers into slots of its own, and updates its share of each unit. One process has the ops 1B@1,
1OFFLOAD_GRAD@0 and, in the step, 1STEP and 1UNSHARD@0 for layer 1. Each of two ranks prints:

    1B@1                the gradient of this rank's part of the batch
    1REDUCE@0           its share of the average over the ranks, and the norm of all shares
    1OFFLOAD_GRAD@0     bring the share to the host
    rootAGREE           step: all ranks have read the weights that are about to change
    1STEP               update this rank's share
    1AGREE              all ranks have updated theirs
    1UNSHARD@0          the whole layer, for the next forward

With ``gather_weights`` each rank copies one part of the layer to its device, and all-gathers the others:

    1UNSHARD@0          this rank's part
    1ALL_GATHER@0       the parts of the others

AGREE reads and writes the shard and the gradient, so every op that uses them waits for it: order is derived
as everywhere. It has a lane of its own, BARRIER: in the lane of ALL_GATHER, the first layer of a forward
would wait until all layers are updated.

State and weights on disk are in files that a machine's ranks share, so AGREE reads and writes their places
too: a rank reaches AGREE when its share is on disk, and no rank reads the whole before. Layer 1 with its
weights and one chunk of this rank's state on disk:

    1READ_WEIGHTS@0     this rank's share
    1READ_STATE@0       its chunk
    1STEP@0
    1WRITE_WEIGHTS@0
    1WRITE_STATE@0
    1AGREE
    1READ_WEIGHTS@1     the whole layer
    1UNSHARD@0

The caller's threads exchange at the end of a backward, when ``p.grad`` is whole, and when user code is about
to write shared memory. A single rank issues none of these ops.

With several machines, each has a host state, divided into shares among its ranks. REDUCE adds a share up
within each machine; then its owners, one on each machine, compute the mean over all ranks. The norm is taken
of the mean, and AGREE waits for the ranks of all machines. Machines may be replicas: each has the whole state
and makes all updates from the same gradients, so that the states stay equal. Or machines divide the state:
each owner of a share holds the masters and moments of a part of it, and updates that part. The weights, 16
bits or masters themselves, are whole on each machine, so new weights are gathered from the owners before they
are read:

    1STEP               update this rank's part of its share
    1GATHER             the owners have updated theirs: bring their new weights here
    1AGREE              this machine has the new weights of all shares

Weights on disk are gathered in the buffer of the update, before this rank writes its share:

    1READ_WEIGHTS@0     this rank's share
    1STEP@0             update a part of it
    1GATHER@0           the other parts
    1WRITE_WEIGHTS@0

Each machine's disk holds the state that its host memory would hold.

Weights cross the network once in a step. If gradients are kept in ``p.grad``, all owners of a share get the
mean; with ``update="backward"`` only the owner that updates gets it.

The root unit is replicated on the devices. Autograd adds to its gradients, so they are averaged at the end of
a backward. Gradients that were averaged before are the same on all ranks, and the mean does not change them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise, product
from operator import or_

import torch

from streamer.backends.ranks import LAYER_AVERAGED, LAYER_GATHERED, Channel, Mean, Ranks
from streamer.engine.guard import Access, Kind, Touch, as_plain
from streamer.engine.paging.host_gradient import HostGradient, is_summed
from streamer.engine.paging.norms import Norms, sum_squares, values_of
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Issuer
from streamer.engine.schedule.op import ROOT
from streamer.engine.tensors import walk
from streamer.engine.unit import Unit
from streamer.store.host import HostStore
from streamer.store.layout import ALIGN_BYTES, Layout, Slice, Stretch
from streamer.store.ledger import gather_bytes, reduce_bytes
from streamer.store.purposes import FP32, MASTERING, Purpose
from streamer.store.shard import HostShard
from streamer.store.shares import Share, places_of, within


@dataclass
class _Backward:
    """This rank's data for the exchange at the end of a backward. Parameters are bits, by their position in
    the unit."""

    #: by unit, the parameters that have a gradient of this backward
    used: dict[int, int]
    #: for each parameter of the root: 0 without a gradient, 1 with one, 2 with a sum of several in fp32
    root: list[int]
    #: by unit, the sum of squares of this rank's share of the gradient
    squares: dict[int, float]


class Reduced:
    """The gradient of a layer, averaged over the ranks: its state once the average is done. Calling it
    returns the sum of squares, of this rank's share until the end of the backward unless updates read it."""

    def __init__(
        self, wanted: Sequence[bool], on_host: torch.Tensor | None, squares: torch.Tensor | None = None
    ) -> None:
        #: which of the layer's trainable parameters want a gradient, on all ranks
        self.wanted = wanted
        self._on_host = on_host
        self._used = 0
        self._squares: torch.Tensor | float | None = squares

    def __call__(self) -> torch.Tensor | float:
        assert self._squares is not None, "the gradient is averaged"
        return self._squares

    def set(self, used: int, squares: torch.Tensor) -> None:
        """Called at the average: parameters that some rank has ``used``, and the sum of squares."""
        self._used, self._squares = used, squares
        if self._on_host is not None:
            self._on_host.copy_(squares, non_blocking=True)

    def set_total(self, squares: float) -> None:
        """Called at the end of a backward: the sum of squares of all shares."""
        self._squares = squares

    def used(self) -> list[bool]:
        """Which of the trainable parameters some rank has used."""
        return [bool(self._used >> position & 1) for position in range(len(self.wanted))]

    def is_finite(self) -> bool:
        """Whether it is finite everywhere; does not read the device."""
        assert self._on_host is not None, "updates in backward ask"
        return math.isfinite(self._on_host.item())


class AcrossRanks:
    """The joint work of ranks for one wrapped model; a single rank has none. [Note: ranks]"""

    def __init__(
        self,
        ranks: Ranks,
        issuer: Issuer,
        units: Sequence[Unit],
        root: Unit,
        store: HostStore,
        *,
        in_fp32: bool,
        in_backward: bool,
    ) -> None:
        """Gradients of a shorter dtype are averaged ``in_fp32``, and rounded once. If layers are updated
        ``in_backward``, the updates read the sums of squares on the host."""
        self.ranks = ranks
        self._issuer = issuer
        self._units = units
        self._root = root
        self._store = store
        layouts = [unit.layout for unit in (*units, root)]
        averaging = reduce_bytes(layouts) if in_fp32 and not ranks.is_alone else 0
        self.buffer = issuer.backend.device_buffer(max(averaging, gather_bytes(layouts, store.division)))
        #: the part of the buffer in which gradients are averaged
        self._exact = self.buffer[:averaging].view(FP32)
        #: whether only the rank that updates gets the mean of a gradient
        self._for_one = store.is_divided and in_backward
        on_host = in_backward and not ranks.is_alone
        self._squares = issuer.backend.host_buffer(4 * len(units) if on_host else 0).view(FP32)
        #: a plan's sum of squares, since its lanes do no work
        is_planned = issuer.backend.device.type == "meta"
        self._without_values = torch.empty((), device="meta") if is_planned else None
        self._divide()
        self._used: dict[int, int] = {}
        self._new: dict[int, int] = {}
        #: by unit, its last gradient averaged in the running backward; the sum of squares lacks other shares
        self._reduced: dict[int, Reduced] = {}
        #: the number of gradients averaged in the running backward
        self._num_reduced = 0

    def _divide(self) -> None:
        division, every = self._store.division, (*self._units, self._root)
        self._shares = {unit.index: division.shares(unit.layout) for unit in every}
        #: by unit and machine, the part that each of its ranks updates
        self._parts = {unit.index: division.parts(unit.layout) for unit in every}

    def divide_by_parameter(self) -> None:
        """Let each rank update whole parameters from now on. A collective call between two steps."""
        if self.ranks.is_alone or self._store.division.by_parameter:
            return
        self._issuer.synchronize()
        every = (*self._units, self._root)

        is_planned = self._without_values is not None

        def whole(position: int, purpose: Purpose) -> torch.Tensor:
            if is_planned:
                return torch.empty(0)
            unit = every[position]
            return self.whole(unit, purpose, range(purpose.numel(unit.layout)))

        with self.ranks.together("dividing optimizer state by parameters"):
            writes = self.ranks.is_first_of_machine and not is_planned
            self._store.divide_by_parameter(whole, writes=writes)
        self._divide()

    def reduce(self, unit: Unit, slot: int, gradient: torch.Tensor, used: Sequence[bool]) -> Reduced:
        """Average this rank's share of the gradient of ``unit`` in ``slot``; this rank has ``used`` some
        parameters. The rest of the slot may hold anything afterwards. All parameters that want a gradient
        then have one, since another rank may have used them. There are several ranks."""
        on_host = self._squares[unit.index] if self._squares.numel() else None
        reduced = Reduced(unit.wanted()[: len(used)], on_host, self._without_values)
        wanted, mine = reduced.wanted, _bits(used)
        if not any(wanted):
            return reduced
        with_grad = _bits([param.grad is not None for param in unit.trainable])
        self._used[unit.index] = self._used.get(unit.index, 0) | mine
        self._new.setdefault(unit.index, _bits(wanted) & ~with_grad)
        words = f"{LAYER_AVERAGED}{unit.name}' ({sum(wanted)} parameters)"
        # the rank (and machine) that gets each mean
        means: list[tuple[int, int | None, Share]] = [
            (owner, None, share) for owner, share in enumerate(self._shares[unit.index])
        ]
        mine_of_it = self._store.shards[unit.index].share
        if self._for_one:
            of_machines = [*enumerate(self._parts[unit.index])]
            means = [
                (owner, machine, parts[owner]) for owner, _, _ in means for machine, parts in of_machines
            ]
            mine_of_it = self._store.shards[unit.index].updated

        def work() -> None:
            of_all = self.ranks.exchange(words, mine, channel=Channel.COLLECTIVE)
            self._average(
                [
                    Mean(own.view(gradient), owner, machine)
                    for run, (owner, machine, share) in product(_runs(unit.layout), means)
                    if (own := within(run, share.elements)).numel
                ]
            )
            squares = sum_squares(unit.layout, gradient, wanted, mine_of_it.elements)
            if on_host is not None:
                # added up in the same order on all ranks, so that they get the same norm
                squares = self.ranks.gathered(squares, of_machines=self._for_one).sum()
            reduced.set(reduce(or_, of_all), squares)

        sent = self._sent(unit.layout.grad_nbytes, rounds=1, for_one=self._for_one)
        self._issuer.issue(ops.reduce(unit.index, slot, sent), work)
        self._num_reduced += 1
        if on_host is None:
            self._reduced[unit.index] = reduced
        return reduced

    def _sent(self, nbytes: int, *, rounds: int, for_one: bool = False) -> int:
        """Bytes that each rank sends if ``nbytes`` are averaged in a ring. The data is cut into pieces, one
        for each rank. In the first round, the pieces are passed from rank to rank to be added up; in a second
        round, all ranks get the sums: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for
        clusters of workstations", 2009."""
        here, machines = self.ranks.local_size, self.ranks.machines
        # the share is also averaged over the machines; their ranks all need the mean unless it is ``for_one``
        between_machines = (1 if for_one else 2) * (nbytes // here) * (machines - 1) // machines
        return rounds * nbytes * (here - 1) // here + self.ranks.over_network(between_machines)

    def _average(self, means: Sequence[Mean]) -> None:
        """`Ranks.average`, of shorter dtypes in fp32, one piece after another."""
        at_once = [mean for mean in means if mean.tensor.dtype == FP32 or not self._exact.numel()]
        self.ranks.average(at_once)
        for gradient, owner, on_machine in means:
            if gradient.dtype == FP32 or not self._exact.numel():
                continue
            for piece in gradient.view(-1).split(self._exact.numel()):
                exact = self._exact[: piece.numel()]
                exact.copy_(piece)
                self.ranks.average([Mean(exact, owner, on_machine)])
                piece.copy_(exact)

    def check_backward(self) -> None:
        """All layers have gone backward on this rank. Raises RanksError if other ranks have run more or fewer
        layers: a rank would wait for their gradients."""
        if self.ranks.is_alone:
            return
        self.ranks.exchange(f"the end of a backward of {self._num_reduced} layers")
        self._num_reduced = 0

    @as_plain
    def finish_backward(
        self, held: Mapping[int, HostGradient], norms: Norms, added: Mapping[int, list[float]]
    ) -> None:
        """The layers' gradients have arrived on this rank: wait for the others' shares, drop the gradients of
        parameters that no rank has used, average the root's gradients. ``added`` has, by unit with gradients
        added on the host, the sums of squares of this rank's share; they are replaced by those of all
        shares, and those of averaged gradients too."""
        if self.ranks.is_alone:
            return
        of_root = [*held[ROOT].pairs()]
        for slice, param in of_root:
            if param.grad is not None and param.grad.is_sparse:
                raise RuntimeError(
                    f"'{slice.param.name}' has a sparse gradient, which ranks cannot average: make it dense "
                    "(nn.Embedding(sparse=False))"
                )
        new, averaged = self._new, self._reduced
        squares = dict(zip(averaged, values_of([*averaged.values()]), strict=True))
        mine = _Backward(
            self._used,
            [0 if param.grad is None else 1 + is_summed(param) for _, param in of_root],
            squares | {index: sum(found) for index, found in added.items()},
        )
        self.forget()
        everyone: list[_Backward] = self.ranks.exchange("waiting for the others' gradients", mine)
        of_shares = self.ranks.of_shares(everyone)
        for index, reduced in averaged.items():
            reduced.set_total(math.fsum(each.squares[index] for each in of_shares))
        for index, found in added.items():
            found[:] = [each.squares[index] for each in of_shares]
        for index, bits in new.items():
            used = reduce(or_, (each.used.get(index, 0) for each in everyone))
            self._drop(self._units[index], bits & ~used, norms)
        flags = [max(of_param) for of_param in zip(*(each.root for each in everyone), strict=True)]
        self._average_root(flags, held[ROOT])

    def _drop(self, unit: Unit, bits: int, norms: Norms) -> None:
        unused = [param for position, param in enumerate(unit.trainable) if bits >> position & 1]
        for param in unused:
            param.grad = None
        if unused:
            norms.dropped(unit)

    def _average_root(self, flags: Sequence[int], held: HostGradient) -> None:
        gradients = list[torch.Tensor]()
        for position, (flag, (_, param)) in enumerate(zip(flags, held.pairs(), strict=True)):
            if not flag:
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param, requires_grad=False)
            if flag > 1 and not is_summed(param):
                held.widen(position)
            gradients.append(param.grad.detach())
        if not gradients:
            return

        words = f"averaging the gradients of what is in no layer ({len(gradients)})"

        def work() -> None:
            self.ranks.exchange(words, channel=Channel.COLLECTIVE)
            for gradient in gradients:
                dense = gradient.contiguous()
                self._average([Mean(dense)])
                if dense is not gradient:
                    gradient.copy_(dense)

        self._issuer.mark(ops.collect())
        nbytes = self._sent(sum(gradient.nbytes for gradient in gradients), rounds=2)
        self._issuer.issue(ops.reduce(ROOT, ROOT, nbytes), work)
        self._issuer.wait((ops.grad_slot(ROOT),))

    def begin_writing(self, touch: Touch, access: Access) -> None:
        """If user code is about to write shared memory, wait until no rank reads the old values. The first
        rank of each machine writes for all ranks there. Each rank has the parameters of the root on its own
        device."""
        if self.ranks.is_alone:
            return
        written = [(tag, tensor) for tag, tensor in touch.of(access) if touch.writes(tensor)]
        if not written:
            return
        numbers = [
            each for each in walk((*touch.args, *touch.kwargs.values())) if isinstance(each, int | float)
        ]
        name = touch.function.__name__
        self.ranks.exchange(f"writing what the ranks share by {name} ({numbers})")
        touch.is_of_ranks = True
        if not self.ranks.is_first_of_machine:
            on_device = (Kind.PARAMETER, Kind.GRADIENT)
            touch.not_written |= {
                id(tensor) for tag, tensor in written if tag.unit != ROOT or tag.kind not in on_device
            }

    def forget(self) -> None:
        """Gradients are dropped, or a backward starts afresh."""
        self._used, self._new, self._reduced, self._num_reduced = {}, {}, {}, 0

    def before_updates(self, units: Sequence[int], description: str) -> None:
        """Updates of ``units`` are about to be issued; ``description`` has the values that must be the same
        on all ranks."""
        if not self.ranks.is_alone:
            self._agree(tuple(units), f"optimizer.step() of {len(units)} units ({description})")

    def root_offloaded(self) -> None:
        """The whole root gradient is about to be read; each rank has copied its share to the host."""
        if not self.ranks.is_alone:
            self._agree((ROOT,), "the gradients of what is in no layer are in host memory")

    def after_update(self, unit: Unit) -> None:
        """The update of ``unit`` was issued."""
        if self.ranks.is_alone:
            return
        shard = self._store.shards[unit.index]
        if self._store.is_divided and shard.weights_on_disk.is_empty:
            # .data: a version counter of its own, so that this write does not count as the user's
            self.gather(unit.index, shard.weight.data)
        words = f"updating '{unit.name}'"
        self._agree((unit.index,), words)

    def gather(self, index: int, weight: torch.Tensor, place: int | None = None) -> None:
        """Gather the weights that the other owners of this rank's share have updated into ``weight``. That is
        the weight of unit ``index`` in its host shard or, for weights on disk, in buffer ``place`` of their
        ring."""
        unit = self._root if index == ROOT else self._units[index]
        pieces = [weight[parts[self.ranks.local_rank].gradient] for parts in self._parts[index]]
        words = f"gathering the weights of '{unit.name}'"

        def work() -> None:
            # a rank whose update has failed does not enter the collective, in which the others would hang
            self.ranks.exchange(words, channel=Channel.COLLECTIVE)
            try:
                self.ranks.gather(pieces, self.buffer)
            except Exception as error:
                # the next op in this lane does not wait for this op, and finds no other rank
                self.ranks.tell(error)
                raise

        sent = (len(pieces) - 1) * pieces[self.ranks.machine].numel()
        self._issuer.issue(ops.gather(index, self.ranks.over_network(sent), place), work)

    def parts(self, nbytes: int) -> tuple[slice, list[slice]]:
        """The division of ``nbytes`` of weights that all ranks of a machine need on their devices: the range
        that is cut into one part for each rank, and the ranges that this rank copies, its part and the few
        remaining bytes."""
        each = nbytes // self.ranks.local_size // ALIGN_BYTES * ALIGN_BYTES
        at, end = self.ranks.local_rank * each, self.ranks.local_size * each
        own = [slice(at, at + each), slice(end, nbytes)]
        return slice(0, end), [piece for piece in own if piece.start < piece.stop]

    def all_gather(self, unit: Unit, slot: int, parts: torch.Tensor) -> None:
        """Every rank of this machine copies its part of the weights of ``unit`` into ``slot``; ``parts`` is
        the range of all parts there. Gather the others' parts."""
        words = f"{LAYER_GATHERED}{unit.name}' (gather_weights=True: all ranks call the same layers)"

        def work() -> None:
            # a rank whose copy has failed does not enter the collective, in which the others would hang
            self.ranks.exchange(words, channel=Channel.COLLECTIVE, of=self.ranks.row)
            self.ranks.all_gather(parts)

        sent = parts.numel() * (self.ranks.local_size - 1) // self.ranks.local_size
        self._issuer.issue(ops.all_gather(unit.index, slot, sent), work)

    def whole_shard(
        self,
        unit: Unit,
        purposes: Iterable[Purpose] = MASTERING,
        *,
        only: Slice | None = None,
        to: int | None = None,
    ) -> HostShard:
        """The host shard of ``unit``. If machines divide the state, a shard with copies of the pieces for
        ``purposes``, of ``only`` one parameter or of all. With ``to``, only that rank gets the copies. It is
        then a collective call of all ranks, after all updates are done."""
        shard = self._store.shards[unit.index]
        if not shard.is_divided or self._without_values is not None:
            return shard
        pieces = dict[str, torch.Tensor]()
        for purpose in purposes:
            if not (numel := purpose.numel(unit.layout)) or not shard.has(purpose):
                continue
            wanted = range(numel) if only is None else purpose.range(only)
            found = self.whole(unit, purpose, wanted, to=to)
            if to in (None, self.ranks.rank):
                piece = pieces[purpose.name] = torch.empty(numel, dtype=purpose.dtype)
                piece[wanted.start : wanted.stop] = found
        return shard.with_whole(pieces)

    @as_plain
    def whole(self, unit: Unit, purpose: Purpose, wanted: range, *, to: int | None = None) -> torch.Tensor:
        """A copy of the ``wanted`` elements (or blocks) of ``unit`` for ``purpose``, each held by some
        machine. A collective call, after all issued ops. With ``to`` only that rank gets them."""
        self._issuer.synchronize()
        self.ranks.exchange(f"reading {purpose.name} of '{unit.name}' from all machines")
        machine, column = (None, self.ranks.local_rank) if to is None else self.ranks.place_of(to)
        nothing = torch.empty(0, dtype=purpose.dtype)
        if column != self.ranks.local_rank:
            return nothing
        places = [[*places_of(parts, purpose, wanted)] for parts in self._parts[unit.index]]
        sizes = [sum(stop - start for start, stop, _ in of_machine) for of_machine in places]
        here = [held for held, _ in self._store.shards[unit.index].here(purpose, wanted)]
        mine = torch.cat([nothing, *here]).view(torch.uint8)
        nbytes = [size * purpose.dtype.itemsize for size in sizes]
        of_machines = self.ranks.of_machines(mine, nbytes, to=machine)
        if to not in (None, self.ranks.rank):
            return nothing
        found = torch.empty(len(wanted), dtype=purpose.dtype)
        for of_machine, held in zip(places, of_machines, strict=True):
            values, at = held.view(purpose.dtype), 0
            for start, stop, _ in of_machine:
                found[start - wanted.start : stop - wanted.start] = values[at : at + stop - start]
                at += stop - start
        return found

    def _agree(self, units: tuple[int, ...], words: str) -> None:
        masters = (place for unit in units for place in ops.masters_of(unit, self._store.shards[unit]))
        op = ops.agree(units, tuple(masters))
        self._issuer.issue(op, partial(self.ranks.exchange, words, channel=Channel.BARRIER))

    def release(self) -> None:
        """Release the buffers."""
        self.buffer = self._squares = torch.empty(0, dtype=torch.uint8)
        self._exact = self.buffer.view(FP32)


def _bits(flags: Sequence[bool]) -> int:
    return sum(1 << position for position, flag in enumerate(flags) if flag)


def _runs(layout: Layout) -> list[Stretch]:
    """The trainable parameters of a unit, padding included; adjacent ones of one dtype are joined."""
    slices = layout.trainable
    edges = [i for i, (one, next_) in enumerate(pairwise(slices), 1) if one.dtype != next_.dtype]
    return [
        Stretch(first.dtype, first.offset, first.index, last.index + last.padded - first.index)
        for begin, end in pairwise([0, *edges, len(slices)])
        for first, last in [(slices[begin], slices[end - 1])]
        if slices
    ]
