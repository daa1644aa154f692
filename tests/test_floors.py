"""The house of DESIGN.md, read from the imports: what stands below knows nothing of what stands above it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

HOME = Path(__file__).parent.parent

#: From the ground up. A module belongs to the longest prefix that fits.
FLOORS = (
    "streamer_native",
    "streamer.version",
    "streamer.errors",
    "streamer.torch_private",
    "streamer.quantized",
    "streamer.config_values",
    "streamer.backends",
    "streamer.planner.machine",
    "streamer.planner.cost",
    "streamer.backends.virtual",
    "streamer.store",
    "streamer.engine.schedule",
    "streamer.engine.tensors",
    "streamer.engine.guard",
    "streamer.engine.unit",
    "streamer.engine.paging",
    "streamer.engine.device_memory",
    "streamer.engine.executor",
    "streamer.engine.handle",
    "streamer.engine.layer",
    "streamer.planner",
    "streamer.optim",
    "streamer.model",
    "streamer.planner.choose",
    "streamer.planner.model",
    "streamer.api",
    "streamer.loss",
    "streamer.checkpoint",
    "streamer.pretrained",
    "streamer.deepspeed",
    "streamer",
    "streamer.integrations",
    "streamer.cli.config",
    "streamer.cli.shipped",
    "streamer.cli.data",
    "streamer.cli.build",
    "streamer.cli.run",
    "streamer.cli.calibrate.machine_file",
    "streamer.cli.plan",
    "streamer.cli.calibrate",
    "streamer.cli",
    "streamer.__main__",
)

#: Files beside each other in a folder, above which nobody finds anything.
MOST_FILES = 11

Graph = Mapping[str, frozenset[str]]


def source_files(home: Path, package: str) -> dict[str, Path]:
    """The files of ``package`` by module name."""
    files: dict[str, Path] = {}
    for path in sorted((home / package).rglob("*.py")):
        parts = path.relative_to(home).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def imported(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[str]:
    """Every name that is imported anywhere in ``tree``, inside functions too, from the root."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = module.split(".") if is_package else module.split(".")[:-1]
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{source}.{alias.name}" for alias in node.names)


def import_graph(home: Path, *packages: str) -> dict[str, frozenset[str]]:
    """For every module of ``packages``, what it imports: modules of theirs by name, others as written."""
    files = {name: path for package in packages for name, path in source_files(home, package).items()}

    def resolve(name: str) -> str:
        # `from streamer.engine import op` is a module, `from streamer.engine.op import Op` is in one
        parent = name.rpartition(".")[0]
        return name if name in files else parent if parent in files else name

    return {
        module: frozenset(
            resolve(name)
            for name in imported(ast.parse(path.read_text()), module, is_package=path.stem == "__init__")
        )
        for module, path in files.items()
    }


def floor(module: str) -> int | None:
    """The number of the floor that ``module`` is on, or None for one that is not of this house."""
    fitting = [name for name in FLOORS if module == name or module.startswith(f"{name}.")]
    return FLOORS.index(max(fitting, key=len)) if fitting else None


def climbing(graph: Graph) -> list[str]:
    """The imports that go up."""
    return [
        f"{module} imports {target}"
        for module, targets in sorted(graph.items())
        for target in sorted(targets)
        if (here := floor(module)) is not None and (there := floor(target)) is not None and there > here
    ]


def circle(graph: Graph) -> list[str]:
    """The modules of one circle of imports, its first one repeated at the end; empty where there is none."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph[module] & graph.keys()):
            if found := walk(target, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph) if (found := walk(module, []))), [])


def foreign(graph: Graph) -> set[str]:
    """The top names of what is imported from outside ``graph`` and the standard library."""
    names = {target.split(".")[0] for targets in graph.values() for target in targets - graph.keys()}
    return names - set(sys.stdlib_module_names) - {module.split(".")[0] for module in graph}


@pytest.fixture(scope="module")
def house() -> dict[str, frozenset[str]]:
    return import_graph(HOME, "streamer_native", "streamer")


def test_every_floor_is_built(house: Graph) -> None:
    assert {FLOORS[number] for module in house if (number := floor(module)) is not None} == set(FLOORS)
    assert len(house) > 30, "the files were not found"


def test_no_import_climbs(house: Graph) -> None:
    assert climbing(house) == []


def test_no_folder_is_crowded() -> None:
    folders = [folder for folder in (HOME / "streamer").rglob("*") if folder.is_dir()]
    files = {folder.name: len([*folder.glob("[!_]*.py")]) for folder in (HOME / "streamer", *folders)}
    assert {name: count for name, count in files.items() if count > MOST_FILES} == {}


def test_no_circle(house: Graph) -> None:
    assert circle(house) == []


def test_native_imports_numpy_and_numba_only() -> None:
    assert foreign(import_graph(HOME, "streamer_native")) <= {"numpy", "numba", "llvmlite"}


def test_streamer_imports_only_what_it_declares(house: Graph) -> None:
    project = tomllib.loads((HOME / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
    # llvmlite is numba's own; the extras are asked for by who draws, and by who loads Hugging Face's models
    extras = {"matplotlib", "transformers", "trl", "datasets", "peft", "huggingface_hub"}
    assert foreign(house) - {"llvmlite"} - extras <= declared
    below_command = {
        module: targets
        for module, targets in house.items()
        if not module.startswith(("streamer.cli", "streamer.integrations", "streamer.pretrained"))
    }
    # wrap shows how far it is
    assert foreign(below_command) <= {"numpy", "numba", "llvmlite", "torch", "psutil", "tqdm", "safetensors"}


def test_models_know_nothing_of_streamer() -> None:
    graph = import_graph(HOME, "models")
    assert graph, "no models were found"
    assert foreign(graph) <= {"torch"}


def test_streams_and_threads_are_known_to_backends_only() -> None:
    forbidden = {"record_stream", "wait_stream", "wait_event", "current_stream", "Stream", "cudart"}
    offenders = []
    for module, path in source_files(HOME, "streamer").items():
        if floor(module) == FLOORS.index("streamer.backends"):
            continue
        tree = ast.parse(path.read_text())
        names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        modules = {name.split(".")[0] for name in imported(tree, module, is_package=False)}
        offenders += [
            (module, name) for name in sorted((names & forbidden) | (modules & {"threading", "mmap"}))
        ]
    assert offenders == []


def made_up(home: Path, files: Mapping[str, str]) -> dict[str, frozenset[str]]:
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
    return import_graph(home, "streamer")


GROUND = {
    "streamer/__init__.py": "from streamer.wrapping import wrap\n",
    "streamer/wrapping.py": "import torch\nfrom streamer.engine import op as ops\n",
    "streamer/engine/__init__.py": "",
    "streamer/engine/op.py": "import enum\nfrom streamer.store.host import HostShard\n",
    "streamer/engine/hazards.py": "from streamer.engine.op import Op\n",
    "streamer/store/__init__.py": "",
    "streamer/store/host.py": "",
}


def test_checker_passes_a_sound_tree(tmp_path: Path) -> None:
    graph = made_up(tmp_path, GROUND)
    assert climbing(graph) == []
    assert circle(graph) == []
    assert foreign(graph) == {"torch"}
    assert graph["streamer.wrapping"] == {"torch", "streamer.engine.op"}


@pytest.mark.parametrize(
    "text",
    [
        "from streamer.engine.op import Op\n",
        "from streamer.engine import op\n",
        "import streamer.engine.op as ops\n",
        "from ..engine.op import Op\n",
        "from ..engine import op\n",
        "def late():\n    from streamer.engine.op import Op\n",
    ],
)
def test_checker_finds_a_climbing_import(tmp_path: Path, text: str) -> None:
    graph = made_up(tmp_path, GROUND | {"streamer/store/host.py": text})
    assert climbing(graph) == ["streamer.store.host imports streamer.engine.op"]


def test_every_note_is_in_the_list_of_notes() -> None:
    table = (HOME / "CONTRIBUTING.md").read_text().partition("| note |")[2].partition("\n\n")[0]
    files = [*(HOME / "streamer").rglob("*.py"), *(HOME / "streamer_native").rglob("*.py")]
    notes = {note for file in files for note in re.findall(r"(?m)^\s*\[Note: (.+)\]$", file.read_text())}
    assert len(notes) > 20
    assert [note for note in sorted(notes) if note not in table] == []


def test_the_walks_name_what_is_there() -> None:
    walks = (HOME / "CONTRIBUTING.md").read_text().partition("\nWalks,")[2].partition("\nA hard idea")[0]
    files = re.findall(r"\]\((streamer/[^)]+\.py)\)", walks)
    names = {name.rpartition(".")[2] for name in re.findall(r"`((?:\w+\.)?[A-Za-z_]+)`", walks)}
    defined = {
        name
        for file in (HOME / "streamer").rglob("*.py")
        for name in re.findall(r"(?m)^ *(?:def|class) (\w+)", file.read_text())
    }
    assert len(files) > 10 and len(names) > 10
    assert [file for file in files if not (HOME / file).is_file()] == []
    assert sorted(names - defined) == []
