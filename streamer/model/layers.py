"""Find the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import is_lazy

Layers = str | Sequence[str] | None

#: Modules that hold layers, and their names in errors.
Container = nn.ModuleList | nn.Sequential | nn.ModuleDict
CONTAINERS = "nn.ModuleList, nn.Sequential or nn.ModuleDict"

#: A further stack is streamed too if it has this share of the parameters of the largest.
WORTH_STREAMING = 0.1

#: In a nested list, a child that is this many times smaller than the largest is not streamed: a norm would
#: take a slot in which the next matrix could arrive at the same time.
SMALL = 64


def find_layers(model: nn.Module, layers: Layers) -> list[tuple[str, nn.Module]]:
    """The layers of ``model`` by qualified name, in order, each module once.

    ``layers`` is the dotted path of an `nn.ModuleList`, `nn.Sequential` or `nn.ModuleDict`, a glob of modules
    (``"model.layers.*.mlp"``), several of them, or None for the stacks of similar blocks in the model. For a
    list of lists the layers are the children of the inner lists, except those with no parameters or few
    (`SMALL`), which run outside of slots. For a glob they are the matching modules, except those with no
    parameters. Layers from paths are in the order of the paths; with a glob, all are in the model's order.

    Raises ValueError if a path is not that of a list with modules, if a glob matches nothing or a module that
    cannot be a layer, if a layer is inside another one, or if there are no layers; the error names the lists
    of the model.
    """
    if not (layers is None or isinstance(layers, str | Sequence)):
        raise ValueError(f"layers={layers!r}: it must be a dotted path, a glob, several of them, or None")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"'{name}' has no shape yet, since its module is lazy: run the model once, then wrap it"
            )
    paths = _stacks(model) if layers is None else [layers] if isinstance(layers, str) else list(layers)
    if not paths:
        raise ValueError(f"layers is empty: set it to the path of a list of layers. {_known_lists(model)}")
    found: dict[nn.Module, str] = {}
    for path in paths:
        for name, layer in _matches(model, path) if is_glob(path) else _blocks(_list_at(model, path), path):
            if not is_called(layer):
                raise _never_called(name, layer, path)
            found.setdefault(layer, name)
    if not found:
        raise ValueError(f"layers={layers!r} has no module with parameters in it. {_known_lists(model)}")
    _refuse_nested(found)
    if any(map(is_glob, paths)):
        return [(found[module], module) for module in model.modules() if module in found]
    return [(name, layer) for layer, name in found.items()]


def is_glob(path: str) -> bool:
    """Whether ``path`` has a wildcard."""
    return any(sign in path for sign in "*?[")


def matches(name: str, pattern: str) -> bool:
    """Whether a dotted ``name`` matches a glob of as many parts, each by the rules of `fnmatch`."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _matches(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """The modules with parameters that ``pattern`` matches, by name."""
    # a module in two places may be named by its second name
    modules = model.named_modules(remove_duplicate=False)
    found = [(name, module) for name, module in modules if name and matches(name, pattern)]
    if not found:
        raise ValueError(f"layers='{pattern}' matches no module. {_known_lists(model)}")
    found = [(name, module) for name, module in found if next(module.parameters(), None) is not None]
    if not found:
        raise ValueError(f"layers='{pattern}' matches no module with parameters. {_known_lists(model)}")
    return found


def _never_called(name: str, layer: nn.Module, path: str) -> ValueError:
    """The error for a ``layer`` without a forward at ``path``."""
    remedy = "set wrap(layers=...) to the paths of the lists in it"
    if is_glob(path):
        inner = next(layer.children(), None) is not None
        remedy = f"set layers='{path}.*', the modules in it" if inner else "leave it out of layers="
    return ValueError(
        f"layer '{name}' is a {type(layer).__name__}, which has no forward and is never called: {remedy}"
    )


def _refuse_nested(found: Mapping[nn.Module, str]) -> None:
    """Raise ValueError if one of the modules ``found`` is inside another."""
    for layer, name in found.items():
        for inner in layer.modules():
            if inner is not layer and inner in found:
                raise ValueError(
                    f"layers= has '{name}' and '{found[inner]}', which is inside it: leave one of them out"
                )


def finer_globs(layers: Sequence[tuple[str, nn.Module]]) -> list[str]:
    """Globs for ``layers``. In place of the largest layer, and of those that its glob matches, they match its
    children with parameters, except those that are `SMALL`. Empty if there are no such children."""
    cut = _glob_of(max(layers, key=lambda one: _size(one[1]))[0])
    others = dict.fromkeys(_glob_of(name) for name, _ in layers if _glob_of(name) != cut)
    parts: dict[str, int] = {}
    for name, layer in layers:
        for part, module in _parts_of(layer, name) if _glob_of(name) == cut else ():
            parts[_glob_of(part)] = max(_size(module), parts.get(_glob_of(part), 0))
    return [*_not_small(parts), *others] if parts else []


def _glob_of(name: str) -> str:
    """The glob for module ``name`` and the modules in its place in other members of its lists."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _not_small(sizes: Mapping[str, int]) -> list[str]:
    """Those of ``sizes`` that are not `SMALL`."""
    most = max(sizes.values(), default=0)
    return [name for name, size in sizes.items() if SMALL * size > most]


def _size(module: nn.Module) -> int:
    """Bytes of the module's parameters."""
    return sum(param.numel() * param.element_size() for param in module.parameters())


def _blocks(blocks: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of ``blocks``; a child that is a list is replaced by its own children that are not
    `SMALL`."""
    for name, child in _children(blocks, path):
        if is_list(child):
            parts = dict(_parts_of(child, name))
            sizes = {part: _size(module) for part, module in parts.items()}
            yield from ((part, parts[part]) for part in _not_small(sizes))
        else:
            yield name, child


def _parts_of(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of ``module`` with parameters, by qualified name; a child that is a list is replaced by
    its own children."""
    for name, child in _children(module, path):
        if is_list(child):
            yield from _parts_of(child, name)
        elif next(child.parameters(), None) is not None:
            yield name, child


def _children(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    return ((f"{path}.{key}" if path else key, child) for key, child in module.named_children())


def is_list(module: nn.Module) -> bool:
    """Whether ``module`` only holds other modules, and is never called itself."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict) and not is_called(module)


def is_called(module: nn.Module) -> bool:
    """Whether ``module`` has a forward."""
    # TorchScript's modules have it only on the instance
    forward = getattr(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in vars(module)


def _list_at(model: nn.Module, path: str) -> nn.Module:
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ValueError(f"layers='{path}': there is no such module. {_known_lists(model)}") from None
    if not isinstance(module, Container):
        kind = type(module).__name__
        raise ValueError(
            f"layers='{path}' is a {kind}; it must be an {CONTAINERS}, or a glob of modules that are called "
            f"('layers.*.mlp'). {_known_lists(model)}"
        )
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
    """The paths of the stacks of blocks in ``model``. Candidates are lists with two or more children that all
    have parameters and are not all of different classes. The stacks are the candidate with the most
    parameters, and those outside of it with at least `WORTH_STREAMING` of its parameters."""
    lists = {path: module for path, module in _lists(model).items() if _is_stack(module)}
    sizes = {path: sum(param.numel() for param in module.parameters()) for path, module in lists.items()}
    stacks: list[str] = []
    taken: set[nn.Module] = set()
    # among lists of equal size the first is the outermost
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        if sizes[path] < WORTH_STREAMING * max(sizes.values()):
            break
        modules = set(lists[path].modules())
        if not modules & taken:
            stacks.append(path)
            taken |= modules
    if not stacks:
        raise ValueError(f"layers=None: no list of similar blocks was found. {_known_lists(model)}")
    return [path for path in lists if path in stacks]


def _is_stack(module: nn.Module) -> bool:
    # a dict with children of several classes may hold a whole model: an embedding, the layers, a norm, a head
    if isinstance(module, nn.ModuleDict) and len({type(child) for child in module.children()}) > 1:
        return False
    blocks = [block for _, block in _blocks(module, "")]
    return len({type(block) for block in blocks}) < len(blocks) and all(
        is_called(block) and next(block.parameters(), None) is not None for block in blocks
    )
