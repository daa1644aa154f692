"""Runs one unit after another: unshard, run, offload the gradient, update, reshard.

A step of three layers through two slots, as its ops print (unit, kind, slot):

    rootF 0F@0 2UNSHARD@0 1F@1 2F@0
    2B@0 2OFFLOAD_GRAD@1 0UNSHARD@0 1B@1 1OFFLOAD_GRAD@0 0B@0 0OFFLOAD_GRAD@1
    rootCOLLECT rootOFFLOAD_GRAD rootSTEP rootUNSHARD 0STEP 1STEP 2STEP
    0UNSHARD@0 1UNSHARD@1

Layers 0 and 1 are in their slots when the step begins. Layer 2 takes the slot of layer 0 while layer 1 runs,
and is still there for its backward. The updates run in the order of the next forward, where each layer waits
for its own update.

[Note: threads] A run of a layer changes the executor's state of slots and order, and the layer's modules hold
views of a slot in place of their parameters. So `Executor.lock` is held during a run, and during writes of
weights. Inference may run in any number of threads: during training, each layer then has its weights from
before or after an update. One thread trains: from a backward to the step or to `zero_grad`, another thread's
forwards with gradients, backwards and steps are refused.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import TypeVar

import torch

from streamer.backends.base import Backend, Lane, Lock, Thread, current_thread
from streamer.backends.ranks import Ranks
from streamer.engine.device_memory import Budget, DeviceMemory, HostWatch
from streamer.engine.guard import TAG, Kind, Touch, as_plain, is_in_graph, never_traced
from streamer.engine.paging.across_ranks import AcrossRanks
from streamer.engine.paging.disk_pager import ShardUpdate, WholeUpdate
from streamer.engine.paging.gradients import Gradients
from streamer.engine.paging.host_memory import HostMemory
from streamer.engine.paging.pager import Pager
from streamer.engine.paging.saved_inputs import InputPager
from streamer.engine.schedule import op as ops
from streamer.engine.schedule.hazards import Hazards, Issuer
from streamer.engine.schedule.op import ROOT
from streamer.engine.schedule.order import LayerUse, Phase
from streamer.engine.tensors import SavedBytes
from streamer.engine.unit import Structure, Unit
from streamer.store.host import HostStore
from streamer.store.ledger import UNLIMITED
from streamer.store.shard import HostShard
from streamer.torch_private import (
    backward_number,
    check_finite,
    storage_owners,
    take_copies,
    when_backward_ends,
)

T = TypeVar("T")

#: The number of units whose weights on disk stay in memory after user code has accessed them.
KEPT_UNITS = 2

_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


@dataclass
class Backward:
    """The tensors that a unit's backward reads and writes: the weights and the gradient (flat uint8, in the
    layout of the unit), and the saved inputs. ``used`` tells which trainable parameters got a gradient."""

    weights: torch.Tensor
    gradient: torch.Tensor
    inputs: Sequence[torch.Tensor]
    used: Sequence[bool] = ()


class Executor:
    """The paging of one wrapped model.

    ``units`` are the layers, numbered from 0 in the order of their lists. ``root`` is the rest of the model.
    ``store`` has their shards in the same order, the root's last (so that its index ROOT finds it). There are
    ``num_slots`` weight slots, and more if ``budget`` bytes of device memory have room for them. At most
    ``host_limit`` bytes of host memory are used. State that may be on disk leaves ``for_inputs`` of these
    bytes to saved layer inputs. ``ranks`` are those that share the store. With ``gather_weights`` each rank
    copies a part of a layer to its device, and the devices exchange the parts. [Note: ranks]
    """

    def __init__(
        self,
        backend: Backend,
        units: Sequence[Unit],
        root: Unit,
        store: HostStore,
        *,
        num_slots: int,
        budget: int | None = None,
        sum_in_fp32: bool = True,
        update_in_backward: bool = False,
        host_limit: int = UNLIMITED,
        for_inputs: int = 0,
        ranks: Ranks | None = None,
        gather_weights: bool = False,
        hazards: Hazards | None = None,
    ) -> None:
        self.backend = backend
        self.units = units
        self.root = root
        self.store = store
        self.sum_in_fp32 = sum_in_fp32
        #: held during a run of a layer: one thread at a time. [Note: threads]
        self.lock = Lock()
        #: the thread whose gradients wait for its step
        self._trainer: Thread | None = None
        self.issuer = Issuer(backend, hazards or Hazards())
        is_trained = any(unit.layout.grad_nbytes for unit in (*units, root))
        #: autograd's number of the last backward; when it ends, it waits for the gradients
        self.backward_task = -1
        self.ranks = ranks or Ranks()
        self.across = AcrossRanks(
            self.ranks,
            self.issuer,
            units,
            root,
            store,
            in_fp32=sum_in_fp32,
            in_backward=update_in_backward,
        )
        self.host = HostMemory(
            self.issuer, units, root, store, self.ranks, self.lock, limit=host_limit, for_inputs=for_inputs
        )
        gathers = gather_weights and is_trained and store.division.ranks > 1
        self.pager = Pager(
            self.issuer, units, root, store, self.across, self.host, num_slots=num_slots, gathers=gathers
        )
        self.gradients = Gradients(
            self.issuer,
            units,
            root,
            store,
            self.pager,
            self.across,
            self.host,
            num_slots=num_slots,
            sum_in_fp32=sum_in_fp32,
            in_backward=update_in_backward,
            access=weakref.ref(self),
        )
        self.saved = SavedBytes()
        self.memory = DeviceMemory(
            backend,
            (*units, root),
            self.pager,
            self.gradients,
            self.saved,
            averaging=self.across.buffer.nbytes,
        )
        self.budget = Budget(
            budget or 0,
            self.memory,
            most=num_slots if budget is None else len(units),
            is_trained=is_trained,
            ranks=self.ranks if gathers else Ranks(),
        )
        self.inputs = InputPager(self.issuer, self.saved, self.host)
        self.structure = Structure(units, root.module)
        #: the layer that runs now
        self.running: Unit | None = None
        #: by unit with hooks on parameters, which of its parameters got a gradient in the running backward
        self._hooked: dict[int, list[bool]] = {}
        #: a leaf that requires a gradient, so that a layer's backward runs even if none of its inputs
        #: requires one
        self.token = torch.zeros((), device=backend.device, requires_grad=True)
        #: an empty tensor, by which PyTorch knows the device
        self.blank = torch.empty(0, device=backend.device)
        self.skipped_steps = 0
        self.released = False
        self._host_watch = HostWatch(backend)
        #: by the name of a parameter, the token of the optimizer that updates it (`AdamW.token`)
        self.updated_by: dict[str, object] = {}
        self._root_ready = False
        #: by unit, moments whose memory user code holds
        self._aliased_moments: dict[int, list[torch.Tensor]] = {}
        self.pager.unshard_root()

    def caller(self) -> Thread:
        """The thread that runs the caller. On a GPU, backward runs in one of autograd's threads: then the
        result is the thread that trains."""
        return self._trainer or current_thread() if backward_number() >= 0 else current_thread()

    def check_thread(self, thread: Thread) -> None:
        """Raise RuntimeError if a thread other than ``thread`` is training. [Note: threads]"""
        trainer = self._trainer
        if trainer is not None and trainer is not thread and trainer.is_alive():
            raise RuntimeError(
                f"threads '{thread.name}' and '{trainer.name}' train one model at once, whose gradients "
                "would be mixed: train in one thread, hold a lock of your own from forward to "
                "optimizer.step() in each, or give each thread a copy.deepcopy of the plain model; "
                "inference needs torch.no_grad()"
            )

    def end_pass(self) -> None:
        """The gradients of the last backward have been used or dropped: any thread may train."""
        self._trainer = None

    def train_in(self, thread: Thread) -> None:
        """Called in the backward of a forward of ``thread``. Raises RuntimeError if another thread is
        training."""
        self.check_thread(thread)
        self._trainer = thread

    def begin_backward(self) -> None:
        """Called during a backward: it ends only when all gradients are in host memory."""
        task = backward_number()
        if self.backward_task != task:
            self.backward_task = task
            when_backward_ends(self.finish_backward)

    def begin(self) -> None:
        """Bring the root unit's weights on the device up to date before they are read.

        A CUDA stream that the caller has just switched to has not waited for them yet, so it waits too.
        """
        with self.lock:
            if self._root_ready:
                if self.backend.changes_stream():
                    self.issuer.mark(ops.root_forward())
                return
            self.check_unchanged()
            self.issuer.mark(ops.root_forward())
            self.pager.parameters.take_over_root()
            self.pager.parameters.end_flight(self.root)
            self._root_ready = True

    def check_unchanged(self) -> None:
        """Raise ValueError if layers or their parameters were replaced after wrap, or the memory of a
        parameter."""
        with self.lock:  # another thread's run of a layer replaces parameters
            self.structure.check()
            for unit in (*self.units, self.root):
                self.pager.parameters.check_places(unit)

    def synchronize(self) -> None:
        """Block the caller until every copy and update is done."""
        with self.lock:
            if self.released:
                return
            self.pager.refresh()
            self.issuer.synchronize()
            for unit in (*self.units, self.root):
                self.pager.parameters.end_flight(unit)

    def forget_failures(self) -> None:
        """Continue as if no submitted work had failed, for a caller that has repaired the damage. After a
        failure, updates that have not begun are dropped."""
        with self.lock:
            if self.issuer.forget_failures():
                self.pager.begin_anew()

    def await_update(self, unit: Unit) -> None:
        """Block until user code may read and write the weights and the optimizer state of ``unit``.

        On a GPU, the host does not block for the root: later kernels on its weights wait for the copy.
        """
        if not self.pager.parameters.of[unit.index].in_flight:
            return
        with self.lock:
            if not self.pager.parameters.of[unit.index].in_flight or self.released:
                return
            if unit is self.root:
                self._root_ready = False
                self.begin()
            elif self.shard(unit).is_out:
                self.pager.parameters.copy_in(unit)
            else:
                self.issuer.wait((ops.shard(unit.index),))
                self.pager.parameters.end_flight(unit)

    @contextmanager
    def _running(self, unit: Unit) -> Iterator[None]:
        """Run the block as the only run of a layer, that of ``unit``."""
        if self.running is not None:
            raise RuntimeError(
                f"layer '{unit.name}' is called inside of layer '{self.running.name}': call it outside of "
                "other streamed layers, or keep one of both lists out of layers="
            )
        self.running = unit
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise self.memory.out_of_memory(unit, error) from error
        finally:
            # Ctrl-C may have ended the block of `Unit.using` too early; it cannot interrupt the ends of both
            unit.restore()
            self.running = None

    @contextmanager
    def forward(self, unit: Unit, phase: Phase) -> Iterator[torch.Tensor]:
        """The slot (flat uint8) with the weights of ``unit``, which runs forward in the block. [Note:
        threads]"""
        with self.lock, self._running(unit):
            self.begin()
            self.inputs.settle()
            self.budget.begin_forward(unit.index)
            with (
                self.pager.resident(unit, LayerUse(unit.index, phase)) as slot,
                self.issuer.computing(ops.forward(unit.index, slot.number)),
            ):
                yield slot.weights

    @contextmanager
    def backward(self, unit: Unit, saved: int | None = None) -> Iterator[Backward]:
        """The tensors that the backward of ``unit``, which runs in the block, reads and writes; ``saved`` is
        the number of its inputs in `InputPager`. After the block the gradient is copied to the host. With
        update="backward" the update is queued, too. The caller holds the lock."""
        self.begin()
        if not (self.ranks.is_alone or self.gradients.are_kept):
            # after the average, other ranks write the shard, which this rank may be saving in a checkpoint
            self.host.wait_for_saving()
        with (
            self._running(unit),
            self.gradients.slot_for(unit) as into,
            self.inputs.using(saved) as (inputs, places),
            self.pager.resident(unit, LayerUse(unit.index, Phase.BACKWARD)) as slot,
        ):
            self.inputs.prefetch(saved)
            with self.issuer.computing(ops.backward(unit.index, slot.number, into, places)):
                run = Backward(slot.weights, self.gradients.in_slot(into), inputs)
                yield run
                self._note_hooks(unit, run.used)
                squares = self.gradients.measure(unit, run.gradient, run.used)
            is_updated = self.gradients.copy_out(unit, into, run.gradient, run.used, squares)
        if is_updated:
            self.pager.update_issued(unit, unit.params)
            self.pager.training.prefetch()

    def before(self, touch: Touch) -> None:
        """Block until a function of PyTorch may read and write its guarded arguments. [Note: what the user
        sees]"""
        if self.released:
            return
        for tag, tensor in touch.of(self):
            unit = self.unit(tag.unit)
            if tag.kind is Kind.GRADIENT:
                self.gradients.before_access(unit)
            elif tag.kind is not Kind.COPY:
                self.await_update(unit)
            elif touch.writes(tensor):
                raise RuntimeError(
                    "this is a copy of a moment that is divided among machines: assign a new value instead "
                    "(optimizer.state[p]['exp_avg'] = tensor), on all ranks"
                )
            if touch.function is torch.autograd.grad and unit is not self.root:
                raise RuntimeError(
                    f"torch.autograd.grad does not support '{tag.name}', which is in a streamed layer: call "
                    "loss.backward() and take p.grad"
                )
        if touch.function in take_copies:
            # PyTorch allows numbers on a GPU to be copied to the host, and does not wait for the copy
            numbers = (*touch.args[1:], *touch.kwargs.values())
            if any(isinstance(item, torch.Tensor) and item.device.type == "cpu" for item in numbers):
                self.backend.finish_compute()
        self.across.begin_writing(touch, self)

    def after(self, touch: Touch) -> None:
        """Called after the function."""
        if self.released:
            return
        for tag, tensor in touch.of(self):
            if (
                tag.kind is Kind.PARAMETER
                and touch.function is torch.Tensor.copy_
                and touch.args[0] is tensor
            ):
                # before other ranks continue
                self.pager.parameters.copied_in(self.unit(tag.unit), tag.position, touch.args[1])
        if touch.is_of_ranks:
            self._end_writing(touch)
        for tag, tensor in touch.of(self):
            unit, is_aliased = self.unit(tag.unit), touch.aliases(tensor)
            if tag.kind is Kind.GRADIENT and (is_aliased or touch.writes(tensor)):
                is_written, shrinks = touch.writes(tensor), touch.shrinks()
                self.gradients.touched(unit, tensor, wrote=is_written, is_aliased=is_aliased, shrinks=shrinks)
            elif tag.kind is Kind.PARAMETER and is_aliased:
                self.pager.parameters.alias(unit, tag.position, to_read=is_in_graph(touch.result))
            elif tag.kind is Kind.MOMENT and is_aliased:
                moments = self._aliased_moments.setdefault(tag.unit, [])
                if all(tensor is not each for each in moments):
                    moments.append(tensor)
        # only now: a function may take parameters of several layers
        for unit in self.pager.parameters.beyond(KEPT_UNITS):
            self.pager.refresh_unit(unit)

    def _end_writing(self, touch: Touch) -> None:
        """All ranks may now read the written values. They also exchange what a GradScaler has found."""
        units = {tag.unit: self.unit(tag.unit) for tag, _ in touch.of(self) if tag.kind is Kind.PARAMETER}
        on_disk = [unit for _, unit in sorted(units.items()) if self.shard(unit).uses_disk]
        with self.ranks.together("writing what the ranks share"):
            if self.ranks.is_first_of_machine:
                self.pager.parameters.write_copies(on_disk)
        if touch.function is check_finite:
            found_inf = touch.args[1]
            found = self.ranks.exchange("what is not finite in gradients", float(found_inf))
            found_inf.fill_(max(found))
        if on_disk:
            with self.ranks.together("reading what the ranks share from disk"):
                for unit in on_disk:
                    self.pager.parameters.read_copy(unit)
                    self.pager.refresh_unit(unit)

    @as_plain
    def aliased(self) -> list[Unit]:
        """The units whose memory user code holds in tensors other than parameters, gradients and moments."""
        found = {
            index: [each for each in moments if storage_owners(each) > each.__dict__[TAG].owners]
            for index, moments in self._aliased_moments.items()
        }
        self._aliased_moments = {index: moments for index, moments in found.items() if moments}
        units = (
            *self.pager.parameters.aliased(),
            *self.gradients.aliased(),
            *map(self.unit, self._aliased_moments),
        )
        return [*{unit.index: unit for unit in units}.values()]

    def _await_aliased(self) -> None:
        """Wait for the updates of aliased units, since reads and writes through an alias do not wait."""
        for unit in self.aliased():
            self.await_update(unit)

    def before_zeroing(self) -> None:
        """Gradients are about to be set to zero: wait for the updates that read them, and for other ranks."""
        self.synchronize()
        if not self.released:
            self.ranks.exchange("setting gradients to zero")

    def zero_grad(self) -> None:
        """Gradients are about to be dropped."""
        self.end_pass()
        # inputs that a failed backward has not fetched
        with self.lock:
            self.inputs.settle()
        self.gradients.zero_grad()

    def prepare(self, work: Callable[[], None]) -> None:
        """Queue ``work`` on HOST that uses no weights, gradients or state (loading kernels, for example)."""
        self.backend.submit(Lane.HOST, work, (), 0)

    @never_traced
    def finish_backward(self) -> None:
        """Block until the gradients of all layers are in host memory, in ``p.grad``."""
        self.gradients.finish_backward()
        self._run_hooks()
        if not self.gradients.are_kept:
            self._await_aliased()

    @as_plain
    def _note_hooks(self, unit: Unit, used: Sequence[bool]) -> None:
        """Note which parameters of ``unit`` got a gradient, for the user's hooks on them."""
        if any(map(_HOOKS, unit.trainable)):
            if not self.gradients.are_kept:
                raise RuntimeError(
                    f"a parameter of layer '{unit.name}' has a post-accumulate-grad hook, but "
                    "update='backward' keeps no gradient for it: remove the hook, or wrap with "
                    "update='step'"
                )
            before = self._hooked.get(unit.index, [False] * len(used))
            self._hooked[unit.index] = [*map(operator.or_, before, used)]

    def _run_hooks(self) -> None:
        """Call the user's post-accumulate-grad hooks on parameters of layers whose gradients are on the
        host."""
        hooked, self._hooked = self._hooked, {}
        with torch.no_grad():
            for index, used in hooked.items():
                for param in compress(self.units[index].trainable, used):
                    for hook in [*(_HOOKS(param) or {}).values()]:
                        hook(param)

    def check_idle(self, unit: Unit) -> None:
        """Raise RuntimeError if the calling thread is running ``unit``, which is about to be updated."""
        with self.lock:  # while the lock is held, no other thread runs a layer
            self.pager.check_idle(unit)

    def step(self, updates: Mapping[int, tuple[ShardUpdate, int]], description: str = "") -> None:
        """Queue updates of host shards. ``updates`` has, by unit, its update and the bytes of memory that the
        update moves; ``description`` has the values that must be the same on all ranks.

        They run in the order of the next forward, and a unit is unsharded only after its update. So this may
        return before any update has begun.
        """
        with self.lock:
            self.check_thread(self.caller())
            self._step(updates, description)
            self.end_pass()

    def _step(self, updates: Mapping[int, tuple[ShardUpdate, int]], description: str) -> None:
        self.pager.refresh()
        self._host_watch.check(self.host.bytes)
        if not self.ranks.is_alone:
            # the other ranks write shards that this rank is saving in a checkpoint
            self.host.wait_for_saving()
        self.across.before_updates([*updates], description)
        self.gradients.take_in()
        if ROOT in updates:
            self.gradients.offload_root()
            if isinstance(updates[ROOT][0], WholeUpdate):
                self.across.root_offloaded()
        for unit in (self.root, *self.units):
            if unit.index in updates:
                unit.updates += 1
                update, nbytes = updates[unit.index]
                self.pager.parameters.begin_flight(unit)
                self.pager.update(unit, update, nbytes, ops.gradient(unit.index))
                self.across.after_update(unit)
                self.pager.update_issued(
                    unit, update.params if isinstance(update, WholeUpdate) else unit.params
                )
        self._root_ready = False
        self.fit_budget()
        self.pager.training.prefetch()
        self._await_aliased()

    def fit_budget(self) -> None:
        """After a step: add or drop weight slots to fit the budget of device memory."""
        if self.backward_task >= 0:
            self.budget.settle()

    def release(self) -> None:
        """Release all memory. The weights have been taken out, and the backend is closed.

        An optimizer may still reference the executor; that keeps none of this memory alive.
        """
        self.released = True
        self.store.drop_all()
        self.pager.release()
        for unit in self.units:
            unit.forget_leaves()
        self.gradients.release()
        self.inputs.release()
        self.across.release()
        self.host.release()

    def holds(self, address: int) -> bool:
        """Whether this address is in the model's weights, in host memory or on the device."""
        if self.released or self.backend.device.type == "meta":
            return False
        shards = (shard for shard in self.store.shards if not shard.is_out)
        buffers = [*(shard.weight for shard in shards), self.pager.root_buffer]
        return any(buffer.data_ptr() <= address < buffer.data_ptr() + buffer.nbytes for buffer in buffers)

    def device_bytes(self) -> dict[str, int]:
        """Bytes that the wrapped model holds on the device, by purpose."""
        return self.memory.owned()

    def unit(self, index: int) -> Unit:
        """The unit with that number; ROOT is the root."""
        return self.root if index == ROOT else self.units[index]

    def shard(self, unit: Unit) -> HostShard:
        """The host shard of ``unit``."""
        return self.store.shards[unit.index]
