"""Which modules of a model are its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

Layers = str | Sequence[str] | None

#: Modules that hold layers, and their names in errors.
Container = nn.ModuleList | nn.Sequential | nn.ModuleDict
CONTAINERS = "nn.ModuleList, nn.Sequential or nn.ModuleDict"

#: A further stack is streamed too if it has this share of the parameters of the largest.
WORTH_STREAMING = 0.1

#: In a list inside of a list, a child that is this many times smaller than the largest is not streamed, and
#: neither is such a part of a layer that is streamed in parts: a norm would take a slot in which the next
#: matrix could arrive meanwhile.
SMALL = 64


def find_layers(model: nn.Module, layers: Layers) -> list[tuple[str, nn.Module]]:
    """The layers of ``model`` by qualified name, in order, each module once.

    ``layers`` is the dotted path of an `nn.ModuleList`, `nn.Sequential` or `nn.ModuleDict`, several such
    paths, or None for the stacks of like blocks that are found. Of a list of lists the layers are the
    children of the inner lists, but for those with no parameters or few (`SMALL`), which run as they are.
    Raises ValueError where a path does not lead to a list with modules, or where no layers are found; the
    error names the lists that the model has.
    """
    if not (layers is None or isinstance(layers, str | Sequence)):
        raise ValueError(f"layers={layers!r}: it must be a dotted path, several of them, or None")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"'{name}' has no shape yet, since its module is a lazy one: run the model once, then wrap it"
            )
    paths = _stacks(model) if layers is None else [layers] if isinstance(layers, str) else list(layers)
    if not paths:
        raise ValueError(f"layers is empty: give the path of a list of layers. {_known_lists(model)}")
    found: dict[int, tuple[str, nn.Module]] = {}
    for path in paths:
        for name, layer in _blocks(_list_at(model, path), path):
            if not is_called(layer):
                raise ValueError(
                    f"layer '{name}' is a {type(layer).__name__}, which has no forward and is never called: "
                    "give wrap(layers=...) the paths of the lists in it"
                )
            found.setdefault(id(layer), (name, layer))
    if not found:
        raise ValueError(f"layers={layers!r} has no module with parameters in it. {_known_lists(model)}")
    return list(found.values())


def _blocks(blocks: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of ``blocks``; in place of a child that is a list, its own children, if worth a slot."""
    for name, child in _children(blocks, path):
        if is_list(child):
            yield from worth_a_slot(child, name)
        else:
            yield name, child


def worth_a_slot(module: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The parts of ``module``, without those that are `SMALL`."""
    parts = [(name, part, sum(p.numel() for p in part.parameters())) for name, part in parts_of(module, path)]
    most = max((numel for _, _, numel in parts), default=0)
    return [(name, part) for name, part, numel in parts if SMALL * numel > most]


def parts_of(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of ``module`` with parameters, by qualified name; in place of a child that is a list, its
    own children."""
    for name, child in _children(module, path):
        if is_list(child):
            yield from parts_of(child, name)
        elif next(child.parameters(), None) is not None:
            yield name, child


def _children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    return ((f"{path}.{key}" if path else key, child) for key, child in module.named_children())


def is_list(module: nn.Module) -> bool:
    """Whether ``module`` only holds other modules, and is never called itself."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and not is_called(module)


def is_called(module: nn.Module) -> bool:
    """Whether ``module`` has a forward."""
    # TorchScript's modules show theirs on the instance alone
    forward = getattr(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in vars(module)


def _list_at(model: nn.Module, path: str) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"layers='{path}': there is no such module. {_known_lists(model)}") from None
    if not isinstance(module, Container):
        kind = type(module).__name__
        raise ValueError(f"layers='{path}' is a {kind}; it must be an {CONTAINERS}. {_known_lists(model)}")
    if next(module.children(), None) is None:
        raise ValueError(f"layers='{path}' is an empty list. {_known_lists(model)}")
    return module


def _lists(model: nn.Module) -> dict[str, nn.Module]:
    return {
        path: module
        for path, module in model.named_modules()
        # the children of a list may all be None
        if isinstance(module, Container) and next(module.children(), None) is not None
    }


def _known_lists(model: nn.Module) -> str:
    lists = [
        f"'{path}' ({len(list(module.children()))} x {type(next(module.children())).__name__})"
        for path, module in _lists(model).items()
    ]
    return f"Found in this model: {', '.join(lists)}" if lists else "This model has no list of modules"


def _stacks(model: nn.Module) -> list[str]:
    """The paths of the stacks of blocks in ``model``: of the lists with two or more children that all have
    parameters and are not each of a class of its own, the one with the most parameters, and those outside of
    it that have at least `WORTH_STREAMING` of its parameters."""
    lists = {path: module for path, module in _lists(model).items() if _is_stack(module)}
    sizes = {path: sum(param.numel() for param in module.parameters()) for path, module in lists.items()}
    stacks: list[str] = []
    taken: set[nn.Module] = set()
    # of lists of equal size the first is the outermost
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        if sizes[path] < WORTH_STREAMING * max(sizes.values()):
            break
        modules = set(lists[path].modules())
        if not modules & taken:
            stacks.append(path)
            taken |= modules
    if not stacks:
        raise ValueError(f"layers=None: no list of like blocks was found. {_known_lists(model)}")
    return [path for path in lists if path in stacks]


def _is_stack(module: nn.Module) -> bool:
    # a dict with children of several classes may hold a whole model: an embedding, the layers, a norm, a head
    if isinstance(module, nn.ModuleDict) and len({type(child) for child in module.children()}) > 1:
        return False
    blocks = [block for _, block in _blocks(module, "")]
    return len({type(block) for block in blocks}) < len(blocks) and all(
        is_called(block) and next(block.parameters(), None) is not None for block in blocks
    )
