"""Several threads and one model: visits take turns, and one thread trains.

[Note: threads]
A visit of a layer changes what the executor knows (slots, order, hazards) and lets the layer's modules see
views of a slot for a while. So `Turns.lock` is held from the first to the last line of a visit, and by what
changes weights (`step`). Layers are called inside of layers, hence the lock is reentrant. Inference in any
number of threads is then that of plain PyTorch; beside training each layer has the weights of before an
update or of after it. What is in no layer is read outside of any visit, as in plain PyTorch.

Training is more than its visits: gradients of a forward, its backward and the step belong together. A
training pass lasts from a thread's first forward to its `step` or `zero_grad`. Another thread may begin one
at any time, unless a backward is running: a forward that nobody goes back through, to warm up, is also a pass
that has not ended. The thread that then goes on with its old pass, while the new one lasts, is refused.

Who asks is the thread that calls the layer. On a GPU, backward runs in a thread of autograd's, and forwards
that are run again there belong to the pass of that backward; so a visit keeps the number of its pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from streamer.backends.base import Lock, Thread, current_thread
from streamer.torch_private import backward_number, when_backward_ends


class Turns:
    """Who may use an executor. [Note: threads]"""

    def __init__(self) -> None:
        #: held for a visit
        self.lock = Lock()
        #: the number of the pass that was begun last, and the thread that has begun it
        self._number = 0
        self._trainer: Thread | None = None
        #: threads whose pass has not ended
        self._open: weakref.WeakSet[Thread] = weakref.WeakSet()
        self._backwards: weakref.WeakSet[_Backward] = weakref.WeakSet()

    def forward(self) -> int:
        """A forward that a backward may follow begins; the number of its pass. The caller holds the lock.

        Raises RuntimeError if another thread is training.
        """
        if backward_number() < 0:
            thread = current_thread()
            if thread is not self._trainer:
                self._check_no_backward(thread)
                self._check_not_overtaken(thread)
                self._number += 1
                self._trainer = thread
            self._open.add(thread)
        return self._number

    def backward(self, number: int) -> None:
        """The backward of a forward of pass ``number`` begins. The caller holds the lock. Raises RuntimeError
        if another thread is training."""
        if number != self._number and self._is_training():
            self._refuse(current_thread())
        self._check_no_backward(current_thread())

    def until_backward_ends(self, call: Callable[[], None]) -> None:
        """Let ``call`` be called when the backward that is running ends; none begins in another thread before
        it has ended or failed. The caller holds the lock."""
        backward = _Backward(self, call)
        self._backwards.add(backward)
        # autograd alone holds the object, and lets it go even if the backward fails
        when_backward_ends(backward)

    def end_backward(self, backward: _Backward) -> None:
        """``backward`` has ended, whoever may still hold the object."""
        with self.lock:
            self._backwards.discard(backward)

    def check(self) -> None:
        """Weights are about to be updated. Raises RuntimeError if another thread is training."""
        thread = current_thread()
        with self.lock:
            self._check_no_backward(thread)
            self._check_not_overtaken(thread)

    def end(self) -> None:
        """The calling thread's pass has ended."""
        self._open.discard(current_thread())

    def _is_training(self) -> bool:
        trainer = self._trainer
        return trainer is not None and trainer in self._open and trainer.is_alive()

    def _check_not_overtaken(self, thread: Thread) -> None:
        if thread in self._open and thread is not self._trainer and self._is_training():
            self._refuse(thread)

    def _check_no_backward(self, thread: Thread) -> None:
        # not a backward itself: the traceback of the error would keep what this frame holds
        others = [backward.thread for backward in self._backwards if backward.thread is not thread]
        if others:
            self._refuse(thread, others[0])

    def _refuse(self, thread: Thread, other: Thread | None = None) -> None:
        other = other or self._trainer
        assert other is not None, "somebody else is training"
        raise RuntimeError(
            f"threads '{thread.name}' and '{other.name}' train one model at once, whose gradients would be "
            "mixed: train in one thread, hold a lock of your own from forward to optimizer.step() in each, "
            "or give each thread a copy.deepcopy of the plain model; inference needs torch.no_grad()"
        )


class _Backward:
    """A backward that is running, for as long as autograd holds this."""

    def __init__(self, turns: Turns, call: Callable[[], None]) -> None:
        self._turns = weakref.ref(turns)
        self._call = call
        self.thread = current_thread()

    def __call__(self) -> None:
        try:
            self._call()
        finally:
            if (turns := self._turns()) is not None:
                turns.end_backward(self)
