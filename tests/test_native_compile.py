"""How kernels are entered and cached: two threads at once, the number of threads, the traps of the cache."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numba
import pytest

import streamer_native
from streamer_native._compile import exclusive

PACKAGE = Path(streamer_native.__file__).parent


def run_python(code: str, *, folder: Path, **environment: str) -> str:
    """What `code` prints, run with `folder` on the path in a process of its own."""
    finished = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    return finished.stdout.strip()


def copy_of_the_package(folder: Path) -> Path:
    return shutil.copytree(PACKAGE, folder / "streamer_native", ignore=shutil.ignore_patterns("__pycache__"))


def test_two_threads_at_once_survive_the_workqueue_layer():
    code = """
import threading, numba, numpy as np, streamer_native
arrays = [[np.zeros(70_000, np.float32) for _ in range(4)] for _ in range(2)]
def steps(arrays):
    master, grad, exp_avg, exp_avg_sq = arrays
    grad[:] = 1
    for step in range(1, 301):
        hyper = streamer_native.Hyper(0.01, 0.9, 0.99, 1e-8, 0.0, step)
        segments = [streamer_native.Segment(0, 70_000, hyper)]
        streamer_native.adamw_fp32(master, grad, exp_avg, exp_avg_sq, segments)
        streamer_native.sum_squares(grad)
threads = [threading.Thread(target=steps, args=(a,)) for a in arrays]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert numba.threading_layer() == "workqueue"
assert (arrays[0][0] == arrays[1][0]).all()
print(arrays[0][0][0].round(2))
"""
    assert run_python(code, folder=PACKAGE.parent, NUMBA_THREADING_LAYER="workqueue") == "-3.0"


def test_the_number_of_threads_is_set_in_whichever_thread_calls():
    most = numba.config.NUMBA_NUM_THREADS
    inside = []

    def call():
        with exclusive():
            inside.append(numba.get_num_threads())

    try:
        for setting in (1, None):
            streamer_native.set_num_threads(setting)
            worker = threading.Thread(target=call)
            worker.start()
            worker.join()
    finally:
        streamer_native.set_num_threads(None)
    assert inside == [1, most]


def test_the_callers_own_number_of_threads_is_left_as_it_was():
    before = numba.get_num_threads()
    try:
        streamer_native.set_num_threads(1)
        with exclusive():
            pass
    finally:
        streamer_native.set_num_threads(None)
    assert numba.get_num_threads() == before


@pytest.mark.parametrize("num_threads", [0, -1, 100_000])
def test_an_impossible_number_of_threads_is_refused(num_threads):
    with pytest.raises(ValueError, match="set the environment variable NUMBA_NUM_THREADS"):
        streamer_native.set_num_threads(num_threads)


def test_kernels_work_where_nothing_can_be_cached(tmp_path):
    package = copy_of_the_package(tmp_path)
    # A file where the folder should be keeps out even root, whom no permission would.
    (package / "__pycache__").write_text("")
    code = """
import numpy as np, streamer_native, streamer_native.reduce as reduce
print(reduce._sum_squares.stats.cache_path, streamer_native.sum_squares(np.ones(5, np.float32)))
"""
    nowhere = "/proc/nowhere"
    printed = run_python(code, folder=tmp_path, NUMBA_CACHE_DIR=nowhere, HOME=nowhere, XDG_CACHE_HOME=nowhere)
    assert printed == "None 5.0"


def test_a_cached_kernel_notices_an_edit_to_a_file_it_calls(tmp_path):
    package = copy_of_the_package(tmp_path)
    code = """
import numpy as np, streamer_native, streamer_native.reduce as reduce
total = streamer_native.sum_squares(np.array([0x4000], np.uint16))
print(total, sum(reduce._sum_squares.stats.cache_hits.values()))
"""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert run_python(code, folder=tmp_path, **environment) == "4.0 0"
    assert run_python(code, folder=tmp_path, **environment) == "4.0 1"
    called = package / "_llvm.py"
    called.write_text(called.read_text().replace("_WORD(16)", "_WORD(15)"))
    assert run_python(code, folder=tmp_path, **environment) != "4.0 1"
