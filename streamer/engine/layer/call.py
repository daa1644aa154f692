"""One call of a layer: its own forward, compiled as long as that works, on weights from a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from streamer.engine.layer.ambient import Ambient, RandomState
from streamer.engine.layer.sharing import untangle
from streamer.engine.paging.unit import Attributes, Unit
from streamer.engine.tensors.attributes import Contents
from streamer.engine.tensors.nested import Rebuild, Tensors, fingerprint, flatten, reachable, stamps
from streamer.engine.tensors.parts import aliases
from streamer.errors import warn

#: A backend of `torch.compile`: its name, or the function itself.
CompileBackend = str | Callable[..., Any]


class Compiler:
    """Compiles the layers of one model, which run on ``device``.

    PyTorch caches compiled code by the code of the forward, and parameters are inputs of it. So layers of one
    class with parameters of the same shapes share one compilation. Where one fails, all layers of that class
    run uncompiled from then on, with one warning, as if the forward that failed had not begun; it raises
    where it has written into a tensor that is an attribute, which nobody can undo.
    """

    def __init__(self, device: torch.device, backend: CompileBackend) -> None:
        # takes a second to import, which users who compile nothing need not wait for
        from torch._dynamo.exc import TorchDynamoException

        self.device = device
        self.failure: type[BaseException] = TorchDynamoException
        self.given_up: set[type[nn.Module]] = set()
        self._backend = backend

    def compile(self, unit: Unit) -> CompiledForward:
        """What runs in place of the forward of the unit's module."""
        return CompiledForward(self, unit, torch.compile(unit.module.forward, backend=self._backend))


class CompiledForward:
    """The forward of one layer: compiled, or plain where compiling has failed."""

    def __init__(self, compiler: Compiler, unit: Unit, compiled: Callable[..., Any]) -> None:
        self.failure = compiler.failure
        self._compiler = compiler
        self._unit = unit
        self._kind = type(unit.module)
        #: the forward that is not compiled
        self.plain: Callable[..., Any] = unit.module.forward
        self._compiled = compiled

    @property
    def works(self) -> bool:
        """Whether the compiled forward is what runs."""
        return self._kind not in self._compiler.given_up

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.works:
            # not `Unit.attributes`, which would keep the attributes that are lent for this run
            attributes = Attributes(self._unit.modules)
            contents = Contents(attributes.contents)
            random = RandomState.now(self._compiler.device, contents.generators)
            buffers, tensors = self._unit.buffers_now(), fingerprint(contents.tensors)
            try:
                return self._compiled(*args, **kwargs)
            except self.failure as error:
                if fingerprint(contents.tensors) != tensors:
                    raise
                self.give_up(error)
            # part of the compiled forward may have run and drawn random numbers or written what modules hold
            random.rewind()
            self._unit.put_back(buffers)
            attributes.put_back()
            contents.put_back()
        return self.plain(*args, **kwargs)

    def give_up(self, error: BaseException) -> None:
        """Run all layers of this class uncompiled from now on, because compiling ended in ``error``."""
        self._compiler.given_up.add(self._kind)
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        warn(
            f"torch.compile fails on {self._kind.__name__}, whose layers run as they are from now on (give "
            f"compile=False to be spared this): {reason}",
        )


def is_compiled(forward: Callable[..., Any]) -> bool:
    """Whether ``forward`` of a layer runs compiled code."""
    return isinstance(forward, CompiledForward) and forward.works


@dataclass(frozen=True)
class Call:
    """A layer's forward and its arguments but for tensors: ``rebuild`` makes (args, kwargs) from those."""

    unit: Unit
    forward: Callable[..., Any]
    rebuild: Rebuild

    @property
    def compile_failures(self) -> tuple[type[BaseException], ...]:
        """The exceptions that compiling the forward may end in; none where it is not compiled."""
        return (self.forward.failure,) if isinstance(self.forward, CompiledForward) else ()

    @property
    def is_compiled(self) -> bool:
        """Whether a compiled forward is what runs."""
        return is_compiled(self.forward)

    def give_up_compiling(self, error: BaseException) -> None:
        """Run the forward uncompiled from now on, because of ``error``, one of `compile_failures`."""
        assert isinstance(self.forward, CompiledForward)
        self.forward.give_up(error)

    def run(
        self,
        weights: torch.Tensor,
        leaves: Tensors,
        inputs: Tensors,
        attributes: Attributes | None = None,
    ) -> tuple[list[torch.Tensor], Rebuild]:
        """Run the forward with ``leaves``, which are views of the slot ``weights``, as parameters.
        ``attributes`` is what `Unit.attributes` returns now, if the caller knows it already.

        Returns the layer's output tensors, and a function that makes the layer's result from them, followed
        by the user's inputs: [Note: shared outputs]. No output aliases the slot, which will soon hold another
        layer. Raises ValueError if the layer changes its arguments.
        """
        args, kwargs = self.rebuild(inputs)
        given = reachable((args, kwargs))
        self._check_seen(given, inputs, "is given", lambda tensor: tensor.requires_grad)
        before = stamps(given)
        try:
            result = run_on_slot(self.unit, self.forward, weights, leaves, args, kwargs, attributes)
        except RuntimeError as error:
            # where the graph is built in forward, autograd refuses this itself, and names no layer
            if "in-place operation" in str(error):
                raise self._changes_its_arguments() from error
            raise
        if fingerprint((args, kwargs)) != before:
            raise self._changes_its_arguments()
        outputs, rebuild = flatten(result)
        self._check_seen(reachable(result), outputs, "returns", lambda tensor: tensor.is_floating_point())
        return untangle(self.unit.name, apart(outputs, weights), rebuild, inputs)

    def forward_on(
        self, weights: torch.Tensor, leaves: Tensors, inputs: Tensors, attributes: Attributes
    ) -> object:
        """What the forward alone returns, which `run` has looked through before."""
        args, kwargs = self.rebuild(inputs)
        return run_on_slot(self.unit, self.forward, weights, leaves, args, kwargs, attributes)

    def run_aside(self, weights: torch.Tensor, inputs: Tensors) -> tuple[list[torch.Tensor], Rebuild]:
        """What `run` returns for ``inputs``. Nothing else is left of that run: its graph saves nothing, the
        layer's buffers and attributes and all random states are what they were, and nothing is compiled."""
        unit, nothing = self.unit, torch.empty(())
        attributes = unit.attributes()
        contents = Contents(attributes.contents)
        buffers = {place: values for place, (_, _, values) in unit.buffers_now().items()}
        forward = self.forward.plain if isinstance(self.forward, CompiledForward) else self.forward
        with (
            Ambient.now(weights.device, contents.generators).again(),
            unit.with_attributes(attributes),
            contents.again(),
            contents.tensors_as_now(),
            unit.with_buffers(buffers),
            saved_tensors_hooks(lambda _: nothing, lambda _: nothing),
        ):
            return replace(self, forward=forward).run(weights, unit.leaves(weights), inputs, attributes)

    def _check_seen(
        self,
        tensors: Tensors,
        seen: Tensors,
        verb: str,
        matters: Callable[[torch.Tensor], bool],
    ) -> None:
        """Refuse tensors inside objects that `flatten` does not open: they would lose their gradients."""
        known = {id(tensor) for tensor in seen}
        if any(id(tensor) not in known and matters(tensor) for tensor in tensors):
            raise ValueError(
                f"layer '{self.unit.name}' {verb} a tensor inside an object of its own class, where its "
                "gradient would be lost: use a tuple, a list, a dict or a dataclass"
            )

    def _changes_its_arguments(self) -> ValueError:
        return ValueError(
            f"layer '{self.unit.name}' changes what it is given (a tensor in place, or a list or a cache "
            "among its arguments), so it cannot run again (in backward, or for micro-batches): let it return "
            "the new value"
        )


def run_on_slot(
    unit: Unit,
    forward: Callable[..., Any],
    weights: torch.Tensor,
    leaves: Tensors,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    attributes: Attributes | None = None,
) -> Any:
    """Run ``forward`` with ``leaves``, views of the slot ``weights``, as parameters; the result may alias
    the slot. ``attributes`` is what `Unit.attributes` returns now, if the caller knows it already.

    Raises ValueError if the forward writes its weights, which are a copy, or keeps a reference to them.
    """
    slot = (weights, *leaves)
    before = [tensor._version for tensor in slot]
    attributes = unit.attributes() if attributes is None else attributes
    # the attributes were asked for a moment ago, and with them the modules
    unit.check_owned()
    with unit.restored(), unit.using(leaves):
        result = forward(*args, **kwargs)
    if changed := attributes.changed():
        unit.forget_attributes()
        _check_not_kept(unit, attributes, changed, weights)
    if [tensor._version for tensor in slot] != before:
        raise ValueError(
            f"layer '{unit.name}' writes its own weights in its forward, which would be lost: write them "
            "between steps"
        )
    return result


def apart(outputs: Tensors, weights: torch.Tensor) -> list[torch.Tensor]:
    """``outputs``, with clones in place of those that alias the slot ``weights``."""
    return [output.clone() if aliases(output, weights) else output for output in outputs]


def _check_not_kept(
    unit: Unit,
    before: Attributes,
    changed: Iterable[tuple[nn.Module, Mapping[str, Any]]],
    weights: torch.Tensor,
) -> None:
    for module, values in changed:
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and values.get(name) is not value and aliases(value, weights):
                before.put_back()
                raise ValueError(
                    f"layer '{unit.name}' keeps a weight, or a view of one, in attribute '{name}' of a "
                    f"{type(module).__name__} beyond its forward, when other weights will be in its place: "
                    "keep a clone, or look the weight up each time"
                )
