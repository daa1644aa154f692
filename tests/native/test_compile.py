"""How kernels are entered and cached: two threads at once, the number of threads, the traps of the cache."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numba
import numpy as np
import pytest

import streamer_native
from streamer_native import _threads

PACKAGE = Path(streamer_native.__file__).parent
MOST = numba.config.NUMBA_NUM_THREADS


def run_python(code: str, *arguments: str, folder: Path, **environment: str) -> str:
    """What `code` prints, run with `folder` on the path and these arguments in a process of its own."""
    without_openmp = {name: value for name, value in os.environ.items() if "OMP_" not in name}
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *arguments],
        cwd=folder,
        env=without_openmp | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    return finished.stdout.strip()


def copy_of_the_package(folder: Path) -> Path:
    return shutil.copytree(PACKAGE, folder / "streamer_native", ignore=shutil.ignore_patterns("__pycache__"))


#: Two threads, whatever the machine has, and no setting of OpenMP: what a user's process is like.
TWO = {"NUMBA_NUM_THREADS": "2"}


def test_two_threads_at_once_do_not_disturb_each_other():
    code = """
import threading, numpy as np, streamer_native
arrays = [[np.zeros(70_000, np.float32) for _ in range(4)] for _ in range(3)]
def steps(arrays):
    master, grad, exp_avg, exp_avg_sq = arrays
    grad[:] = 1
    for step in range(1, 301):
        hyper = streamer_native.Hyper(0.01, 0.9, 0.99, 1e-8, 0.0, step)
        segments = [streamer_native.Segment(0, 70_000, hyper)]
        streamer_native.adamw_fp32(master, grad, exp_avg, exp_avg_sq, segments)
        assert streamer_native.sum_squares(grad) == 70_000
threads = [threading.Thread(target=steps, args=(a,)) for a in arrays[:2]]
for thread in threads: thread.start()
for thread in threads: thread.join()
streamer_native.set_num_threads(1)
steps(arrays[2])
assert (arrays[0][0] == arrays[2][0]).all() and (arrays[1][0] == arrays[2][0]).all()
print(arrays[0][0][0].round(2))
"""
    assert run_python(code, folder=PACKAGE.parent, **TWO) == "-3.0"


@pytest.mark.parametrize("first", ["", "import torch; torch.set_num_threads(1)"])
def test_the_threads_sleep_between_calls(first):
    # counted is the processor time of all threads but this one while this one sleeps: not how long it took
    code = f"""
{first}
import time, numpy as np, streamer_native
grad = np.ones(70_000, np.float32)
streamer_native.sum_squares(grad)
asleep = 0.0
for _ in range(100):
    streamer_native.sum_squares(grad)
    before = time.process_time()
    time.sleep(0.003)
    asleep += time.process_time() - before
print(asleep)
"""
    # a thread that spins takes up to 0.3 seconds
    assert float(run_python(code, folder=PACKAGE.parent, **TWO)) < 0.03


def test_a_forked_process_computes_alone():
    code = """
import os, threading, numpy as np, streamer_native
from streamer_native import _threads
grad = np.ones(200_000, np.float32)
assert streamer_native.sum_squares(grad) == 200_000
# another thread is in the middle of a call
with _threads._team._in_use:
    child = os.fork()
    if not child:
        os._exit(streamer_native.sum_squares(grad) != 200_000)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), threading.active_count())
"""
    assert run_python(code, folder=PACKAGE.parent, **TWO) == "0 2"


def test_what_a_thread_raises_reaches_the_caller():
    caller = threading.get_ident()
    both = threading.Barrier(2, timeout=60)

    def kernel(blocks):
        both.wait()
        if threading.get_ident() != caller:
            raise MemoryError("no scratch")

    with pytest.raises(MemoryError, match="no scratch"):
        _threads._team.run(lambda: kernel(None), 1)
    # and leaves nothing behind
    assert streamer_native.sum_squares(np.ones(100_000, np.float32)) == 100_000


def test_a_thread_that_has_not_begun_is_not_waited_for(monkeypatch):
    team = _threads._Team()
    monkeypatch.setattr(team, "_serve", lambda: None)
    ran = []
    team.run(lambda: ran.append(threading.get_ident()), 3)
    assert ran == [threading.get_ident()]


@pytest.mark.skipif(MOST < 2, reason="Numba has one thread here")
def test_the_number_of_threads_is_that_of_the_thread_that_calls():
    seen = {}

    def call(number):
        streamer_native.set_num_threads(number)
        both_have_set.wait()
        streamer_native.sum_squares(np.ones(100_000, np.float32))
        seen[number] = streamer_native.get_num_threads()

    before = streamer_native.get_num_threads()
    both_have_set = threading.Barrier(2, timeout=60)
    workers = [threading.Thread(target=call, args=(number,)) for number in (1, 2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert seen == {1: 1, 2: 2}
    assert streamer_native.get_num_threads() == before


@pytest.mark.parametrize("num_threads", [0, -1, MOST + 1])
def test_an_impossible_number_of_threads_is_refused(num_threads):
    with pytest.raises(ValueError, match="set the environment variable NUMBA_NUM_THREADS"):
        streamer_native.set_num_threads(num_threads)


#: Sums squares of ones of these dtypes; says what is compiled meanwhile.
SUMS = """
import logging, sys
logging.basicConfig(stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
import numpy as np, streamer_native
print(*(streamer_native.sum_squares(np.ones(5, dtype)) for dtype in sys.argv[1:]))
"""


def test_a_kernel_is_compiled_once_and_again_when_a_file_it_calls_is_edited(tmp_path):
    package = copy_of_the_package(tmp_path)
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    # the bits of a bfloat16 that is denormal
    compiling, sums = run_python(SUMS, "uint16", folder=tmp_path, **cache).splitlines()
    assert compiling.startswith("streamer_native WARNING compiling the host update")
    assert f"some seconds. It is kept in {tmp_path / 'cache'}" in compiling
    assert any((tmp_path / "cache").iterdir())
    assert run_python(SUMS, "uint16", folder=tmp_path, **cache) == sums
    called = package / "_llvm.py"
    called.write_text(called.read_text().replace("_WORD(16)", "_WORD(15)"))
    compiling, other = run_python(SUMS, "uint16", folder=tmp_path, **cache).splitlines()
    assert compiling.startswith("streamer_native WARNING compiling") and other != sums


def test_kernels_are_kept_in_a_folder_of_the_users_and_nothing_beside_the_sources(tmp_path):
    package = copy_of_the_package(tmp_path)
    # what earlier versions have left there
    left = package / "__pycache__" / "reduce.sum_squares-1.py311.1.nbc"
    left.parent.mkdir()
    left.touch()
    users = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_CACHE_DIR": ""}
    compiling, sums = run_python(SUMS, "float32", folder=tmp_path, **users).splitlines()
    assert f"It is kept in {tmp_path / 'cache' / 'streamer' / 'numba'}" in compiling
    assert {path.suffix for path in package.rglob("*.*")} <= {".py", ".pyc", ".typed"}
    assert run_python(SUMS, "float32", folder=tmp_path, **users) == sums
    # the setting of the process, by which the user's own functions are cached, is left alone
    code = "import numba, streamer_native; print([numba.config.CACHE_DIR])"
    assert run_python(code, folder=tmp_path, **users) == "['']"


def test_where_nothing_can_be_cached_kernels_work_and_say_so(tmp_path):
    package = copy_of_the_package(tmp_path)
    nowhere = {name: "/proc/nowhere" for name in ("NUMBA_CACHE_DIR", "HOME", "XDG_CACHE_HOME")}
    compiling, sums = run_python(SUMS, "float32", folder=tmp_path, **nowhere).splitlines()
    assert "No cache directory can be written, so every process will do it again" in compiling
    assert sums == "5.0"
    assert {path.suffix for path in package.rglob("*.*")} <= {".py", ".pyc", ".typed"}
