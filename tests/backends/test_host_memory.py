"""Host memory that is available: what the system has, and what control groups allow of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

from streamer.backends import host_memory
from streamer.backends.cuda import CudaBackend
from streamer.backends.host_memory import available_bytes
from streamer.backends.thread import ThreadBackend

SYSTEM = 10_000


class Tree:
    """A /proc/self and hierarchies of control groups, as files in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "proc").mkdir()

    def member(self, *lines: str) -> None:
        (self.folder / "proc" / "cgroup").write_text("".join(f"{line}\n" for line in lines))

    def mount(self, place: str, version: int, root: str = "/", controllers: str = "memory") -> None:
        path = str(self.folder / place).replace(" ", r"\040")
        kind = "cgroup2 cgroup2 rw" if version == 2 else f"cgroup cgroup rw,{controllers}"
        with (self.folder / "proc" / "mountinfo").open("a") as file:
            file.write("29 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n")
            file.write(f"31 24 0:27 {root} {path} rw,nosuid shared:9 master:2 - {kind}\n")

    def job(self, limit: object, taken: int, **stat: int) -> None:
        """The process is in one group of version 2."""
        self.member("0::/user/job")
        self.mount("cg", 2)
        self.group("cg/user/job", limit, taken, **stat)

    def group(self, path: str, limit: object, taken: int, **stat: int) -> None:
        """Version 2."""
        self._write(path, {"memory.max": limit, "memory.current": taken}, stat)

    def group_1(self, path: str, limit: object, taken: int, **stat: int) -> None:
        self._write(path, {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": taken}, stat)

    def _write(self, path: str, values: dict[str, object], stat: dict[str, int]) -> None:
        folder = self.folder / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (folder / name).write_text(f"{value}\n")
        lines = {"anon": 7, **stat}
        (folder / "memory.stat").write_text("".join(f"{key} {value}\n" for key, value in lines.items()))


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    class Memory:
        available = SYSTEM

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    monkeypatch.setattr(host_memory, "PROC", tmp_path / "proc")
    return Tree(tmp_path)


def test_without_groups_it_is_what_the_system_has(tree: Tree) -> None:
    assert available_bytes() == SYSTEM
    tree.member("0::/")
    tree.mount("cg", 2)
    host_memory.groups.cache_clear()
    assert available_bytes() == SYSTEM, "the top group has no files of memory"


@pytest.mark.parametrize(
    ("limit", "taken", "stat", "expected"),
    [
        (5000, 1200, {"inactive_file": 300, "active_file": 40}, 4140),
        # file pages of which some have not been counted yet
        (5000, 100, {"inactive_file": 300}, 5000),
        (5000, 6000, {}, 0),
        ("max", 1200, {}, SYSTEM),
    ],
)
def test_a_group_of_version_2(
    tree: Tree, limit: object, taken: int, stat: dict[str, int], expected: int
) -> None:
    tree.job(limit, taken, **stat)
    assert available_bytes() == expected
    assert ThreadBackend.host_available(Any) == CudaBackend.host_available(Any) == expected


def test_the_least_of_a_group_and_those_above_it_counts(tree: Tree) -> None:
    tree.member("0::/pod/task/step")
    tree.mount("cg", 2)
    tree.group("cg/pod", 4000, 3000, inactive_file=500)
    tree.group("cg/pod/task", "max", 2000)
    tree.group("cg/pod/task/step", 3000, 1000)
    tree.group("cg/pod/neighbour", 10, 10)
    assert available_bytes() == 1500
    # what is taken is read anew each time
    tree.group("cg/pod", 4000, 3900)
    assert available_bytes() == 100


@pytest.mark.parametrize("own", ["/docker/1234/inner", "/elsewhere", "/../outside"])
def test_only_a_part_of_the_hierarchy_is_mounted(tree: Tree, own: str) -> None:
    tree.member("11:pids:/other", f"4:cpu,memory:{own}", "1:name=systemd:/docker/1234")
    tree.mount("cg memory", 1, root="/" if ".." in own else "/docker/1234")
    tree.group_1("cg memory", 3000, 1000)
    tree.group_1("cg memory/inner", 2000, 900)
    tree.group_1("docker/1234", 1, 1)
    tree.group_1("outside", 1, 1)
    assert available_bytes() == (1100 if own.endswith("inner") else 2000)


def test_a_group_of_version_1(tree: Tree) -> None:
    tree.member("4:memory:/batch/job", "0::/")
    tree.mount("cg/cpu", 1, controllers="cpu")
    tree.mount("cg/memory", 1)
    tree.mount("cg/unified", 2)
    tree.group_1("cg/cpu/batch/job", 1, 1)
    # in this version a group's own statistics leave those of its children out
    stat = {"inactive_file": 1, "total_inactive_file": 600, "total_active_file": 50}
    tree.group_1("cg/memory/batch/job", 5000, 3000, **stat)
    tree.group_1("cg/memory/batch", 9223372036854771712, 3000)
    tree.group_1("cg/memory", 9223372036854771712, 9000)
    assert available_bytes() == 2650
    tree.group_1("cg/memory/batch", 3500, 3000)
    assert available_bytes() == 500


def test_statistics_that_are_not_there_say_nothing_of_the_cache(tree: Tree) -> None:
    tree.job(5000, 4000, inactive_file=100)
    (tree.folder / "cg/user/job/memory.stat").unlink()
    assert available_bytes() == 1000
    (tree.folder / "cg/user/job/memory.current").unlink()
    assert available_bytes() == SYSTEM
