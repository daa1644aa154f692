"""Which modules of a model are its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

Layers = str | Sequence[str] | None

#: A second stack is streamed too if it has this share of the parameters of the largest.
WORTH_STREAMING = 0.1


def find_layers(model: nn.Module, layers: Layers) -> list[tuple[str, nn.Module]]:
    """The layers of ``model`` by qualified name, in order, each module once.

    ``layers`` is the dotted path of an `nn.ModuleList` or `nn.Sequential`, several such paths, or None
    for the stacks of like blocks that are found. A list of lists stands for what is in those. Raises
    ValueError where a path does not lead to a non-empty list, or where none can be found; it names the lists
    that the model has.
    """
    if not (layers is None or isinstance(layers, str | Sequence)):
        raise ValueError(f"layers={layers!r}: it must be a dotted path, several of them, or None")
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
    return list(found.values())


def _blocks(blocks: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of ``blocks``; in place of a list, which is never called itself, its own children."""
    for key, child in blocks.named_children():
        name = f"{path}.{key}" if path else key
        if isinstance(child, nn.ModuleList):
            yield from _blocks(child, name)
        else:
            yield name, child


def is_called(module: nn.Module) -> bool:
    """Whether ``module`` has a forward."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _list_at(model: nn.Module, path: str) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"layers='{path}': there is no such module. {_known_lists(model)}") from None
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        kind = type(module).__name__
        raise ValueError(
            f"layers='{path}' is a {kind}; it must be an nn.ModuleList or nn.Sequential. "
            f"{_known_lists(model)}"
        )
    if not len(module):
        raise ValueError(f"layers='{path}' is an empty list. {_known_lists(model)}")
    return module


def _lists(model: nn.Module) -> dict[str, nn.Module]:
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module)
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
    blocks = [block for _, block in _blocks(module, "")]
    return len({type(block) for block in blocks}) < len(blocks) and all(
        is_called(block) and next(block.parameters(), None) is not None for block in blocks
    )
