"""Which modules of a model are its layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

Layers = str | Sequence[str] | None


def find_layers(model: nn.Module, layers: Layers) -> list[tuple[str, nn.Module]]:
    """The layers of ``model`` by qualified name, in order, each module once.

    ``layers`` is the dotted path of an `nn.ModuleList` or `nn.Sequential`, several such paths, or None
    for the list of like blocks with the most parameters. Raises ValueError where a path does not lead to
    a non-empty list, or where none can be found; it names the lists that the model has.
    """
    if not (layers is None or isinstance(layers, str | Sequence)):
        raise ValueError(f"layers={layers!r}: it must be a dotted path, several of them, or None")
    paths = _largest_list(model) if layers is None else [layers] if isinstance(layers, str) else list(layers)
    if not paths:
        raise ValueError(f"layers is empty: give the path of a list of layers. {_known_lists(model)}")
    found: dict[int, tuple[str, nn.Module]] = {}
    for path in paths:
        for name, layer in _list_at(model, path).named_children():
            found.setdefault(id(layer), (f"{path}.{name}" if path else name, layer))
    return list(found.values())


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


def _largest_list(model: nn.Module) -> list[str]:
    """The path of the list with the most parameters, of those with two or more children of one class."""
    sizes = {
        path: sum(param.numel() for param in module.parameters())
        for path, module in _lists(model).items()
        if len(list(module.children())) > 1 and len({type(child) for child in module.children()}) == 1
    }
    if not sizes or not max(sizes.values()):
        raise ValueError(f"layers=None: no list of like blocks was found. {_known_lists(model)}")
    # of lists of equal size the first is the outermost
    return [max(sizes, key=lambda path: sizes[path])]
