"""Segments, in all layouts; the fp16 layout; and moments of 16 and 8 bits, whose rounding must not drift."""

import numpy as np
import pytest
import torch

import streamer_native
from streamer_native import QUANTUM, Hyper, Segment
from tests.native.test_adam import (
    USUAL,
    Float64State,
    Fp32State,
    SplitState,
    assert_same_bits,
    bfloat16_bits,
    distance,
    normal,
    widened,
)


class Fp16State(Fp32State):
    """An fp16 weight beside the fp32 master."""

    def __init__(self, master):
        super().__init__(master)
        with np.errstate(over="ignore"):
            self.weight = master.astype(np.float16)

    def step_segments(self, grad, segments, **options):
        moments = self.exp_avg, self.exp_avg_sq
        streamer_native.adamw_fp16(self.weight, self.master, grad, *moments, segments, **options)


class Bf16State(SplitState):
    """Moments as bfloat16 bits."""

    def __init__(self, master):
        super().__init__(master)
        self.exp_avg, self.exp_avg_sq = (np.zeros(master.size, np.uint16) for _ in range(2))

    def step_segments(self, grad, segments, **options):
        moments = self.exp_avg, self.exp_avg_sq
        streamer_native.adamw_split_bf16(self.weight, self.remainder, grad, *moments, segments, **options)

    @property
    def second_moment(self):
        return widened(self.exp_avg_sq)

    def set_second_moment(self, value):
        self.exp_avg_sq[:] = np.array(value, np.float32).view(np.uint32) >> np.uint32(16)


class Int8State(Bf16State):
    """Moments as 8-bit codes and scales."""

    def __init__(self, master):
        super().__init__(master)
        self.exp_avg, self.exp_avg_sq = np.zeros(master.size, np.int8), np.zeros(master.size, np.uint8)
        # Room for a few segments, each of which may begin a block that it does not fill.
        self.exp_avg_scales, self.exp_avg_sq_scales = np.zeros((2, master.size // QUANTUM + 8), np.float32)

    def step_segments(self, grad, segments, **options):
        state = self.exp_avg, self.exp_avg_sq, self.exp_avg_scales, self.exp_avg_sq_scales
        streamer_native.adamw_split_int8(self.weight, self.remainder, grad, *state, segments, **options)

    @property
    def first_moment(self):
        return self.exp_avg * np.repeat(self.exp_avg_scales, QUANTUM)[: self.exp_avg.size]

    @property
    def second_moment(self):
        scales = np.repeat(self.exp_avg_sq_scales, QUANTUM)[: self.exp_avg.size].view(np.uint32)
        codes = self.exp_avg_sq.astype(np.uint32)
        return np.where(codes, (scales + (codes << np.uint32(20))).view(np.float32), np.float32(0))

    def set_second_moment(self, value):
        bits = np.array(value, np.float32).view(np.uint32) >> np.uint32(20)
        self.exp_avg_sq[:] = 200
        self.exp_avg_sq_scales[:] = ((bits - np.uint32(200)) << np.uint32(20)).view(np.float32)


@pytest.fixture
def one_thread():
    """For thousands of launches over few elements: waking the threads would take longer than the work."""
    before = streamer_native.get_num_threads()
    streamer_native.set_num_threads(1)
    yield
    streamer_native.set_num_threads(before)


ALL = [Fp32State, Fp16State, SplitState, Bf16State, Int8State]
ROUNDED = [Bf16State, Int8State]
N = 60_001
SEGMENTS = [
    Segment(3, 3, Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 1), first_scale=7),
    Segment(33, 300, Hyper(1e-2, 0.9, 0.999, 1e-8, 0.0, 1), first_scale=100),
    Segment(300, 555, Hyper(1e-4, 0.8, 0.95, 1e-6, 0.1, 4), first_scale=102),
    Segment(50_007, N, Hyper(1e-3, 0.9, 0.99, 1e-8, 0.1, 9), first_scale=110),
    Segment(601, 40_000, Hyper(3e-3, 0.9, 0.99, 1e-8, 0.1, 7), first_scale=151),
]
SEGMENTS[4] = SEGMENTS[4]._replace(stop=20_000)


def arrays_of(state):
    return {name: value.copy() for name, value in vars(state).items()}


def same(one, other):
    return all(np.array_equal(value, other[name], equal_nan=True) for name, value in one.items())


def started(kind, size, seed=1):
    """A state after one step of everything, so that there is something to leave alone."""
    state = kind(normal(size, seed))
    state.step(normal(size, seed + 1, scale=0.01), step=1, **USUAL)
    return state


@pytest.mark.parametrize("kind", ALL)
def test_segments_at_once_are_segments_one_by_one_and_gaps_are_left_alone(kind):
    at_once, one_by_one = started(kind, N), started(kind, N)
    before = arrays_of(at_once)
    grad = normal(N, seed=3, scale=0.01)
    at_once.step_segments(grad, SEGMENTS, grad_scale=0.5)
    for segment in SEGMENTS:
        one_by_one.step_segments(grad, [segment], grad_scale=0.5)
    assert same(arrays_of(at_once), arrays_of(one_by_one))
    inside = np.zeros(N, bool)
    for segment in SEGMENTS:
        inside[segment.start : segment.stop] = True
    for name, array in arrays_of(at_once).items():
        if array.size == N:
            assert np.array_equal(array[~inside], before[name][~inside]), name
            if name != "exp_avg_sq" and array.itemsize > 1 and name != "weight":
                assert np.mean(array[inside] != before[name][inside]) > 0.9, name


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([(0, 5)], "segment 0 to 5 must lie within the 4 elements"),
        ([(-1, 3)], "segment -1 to 3 must lie within"),
        ([(3, 2)], "segment 3 to 2 must lie within"),
        ([(0, 3), (2, 4)], "segment 2 to 4 .* begin at or after 3"),
    ],
)
def test_a_segment_out_of_place_is_named(bounds, message):
    arrays = [np.zeros(4, np.float32) for _ in range(4)]
    segments = [Segment(start, stop, Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 1)) for start, stop in bounds]
    with pytest.raises(ValueError, match=message):
        streamer_native.adamw_fp32(*arrays, segments)


def test_scales_that_are_not_there_or_taken_are_named():
    state = Int8State(normal(1000, 1))
    hyper = Hyper(1e-3, 0.9, 0.999, 1e-8, 0.1, 1)
    with pytest.raises(ValueError, match="has scales 8 to 12; they must lie within the 11"):
        state.step_segments(normal(1000, 2), [Segment(0, 1000, hyper, first_scale=8)])
    with pytest.raises(ValueError, match="has scales 1 to 2; .* begin at or after 2"):
        halves = [Segment(0, 257, hyper), Segment(257, 300, hyper, first_scale=1)]
        state.step_segments(normal(1000, 2), halves)


@pytest.mark.parametrize("grad_dtype", [np.float16, np.float32], ids=["fp16", "fp32"])
def test_fp16_equals_fp32_to_the_bit_and_streams_the_nearest_half(grad_dtype):
    master = normal(N, seed=1)
    master[:4] = [1e-7, 6e-8, 7e4, -0.0]
    fp16, fp32 = Fp16State(master), Fp32State(master)
    for step in range(1, 21):
        grad = normal(N, seed=step, scale=0.01).astype(grad_dtype)
        grad[10], grad[-1] = np.nan, np.inf
        fp16.step(grad, step=step, grad_scale=2.0**-10, **USUAL)
        fp32.step(grad.astype(np.float32), step=step, grad_scale=2.0**-10, **USUAL)
    assert_same_bits(fp16.master, fp32.master)
    assert_same_bits(fp16.exp_avg_sq, fp32.exp_avg_sq)
    expected = torch.from_numpy(fp32.master).half().numpy()
    assert np.array_equal(fp16.weight, expected, equal_nan=True)
    assert np.isnan(fp16.weight).sum() == 2


@pytest.mark.parametrize("kind", ROUNDED)
def test_rounding_follows_the_seed_and_the_step_and_not_the_threads(kind):
    most = streamer_native.get_num_threads()

    def run(seed, threads):
        state = kind(normal(N, 1))
        streamer_native.set_num_threads(threads)
        try:
            for step in range(1, 4):
                state.step(normal(N, step), step=step, seed=seed, **USUAL)
        finally:
            streamer_native.set_num_threads(most)
        return arrays_of(state)

    assert same(run(5, 1), run(5, most))
    assert np.mean(run(5, 1)["exp_avg_sq"] != run(6, 1)["exp_avg_sq"]) > 0.2


@pytest.mark.parametrize(("kind", "run"), [(Bf16State, 2048), (Int8State, QUANTUM)])
def test_an_element_is_rounded_up_as_often_as_it_should_be_over_runs_and_steps(kind, run):
    """What is rounded up in all runs at once, or at every step, drifts together."""
    runs = steps = 16
    # a third of the way from one that can be held to the next
    value = np.array(0x3F800000 + 0x55555, np.uint32).view(np.float32)
    grad = np.full(runs * run, np.sqrt(value), np.float32)
    ups = []
    for step in range(1, 1 + steps):
        state = kind(np.ones(grad.size, np.float32))
        state.step(grad, step=step, **USUAL | {"beta2": 0.0})
        _, above = np.unique(state.second_moment)
        ups.append((state.second_moment == above).reshape(runs, run))
    rounded = np.stack(ups)
    for alike in (*rounded, *rounded.transpose(1, 0, 2)):
        assert len({row.tobytes() for row in alike}) > 12, "runs of a step, or a run at all steps"
    often = rounded.mean(axis=(0, 1))
    assert np.abs(often - 1 / 3).max() < 6 * np.sqrt(2 / 9 / (runs * steps))


def second_moments(state, size):
    """Mean second moment over the true one: at steady state, and once gradients have long been a tenth."""
    ratios = []
    grads = [normal(size, seed, scale=0.01) for seed in range(61)]
    state.set_second_moment(1e-4)
    step = 1000
    for scale, steps in ((1.0, 3000), (0.1, 9000)):
        scaled = [grad * np.float32(scale) for grad in grads]
        for _ in range(steps):
            step += 1
            state.step(scaled[step % 61], step=step, **USUAL | {"lr": 1e-6})
        ratios.append(float(np.mean(state.second_moment)) / np.mean(np.square(scaled)))
    return ratios


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.usefixtures("one_thread")
def test_the_second_moment_does_not_drift(kind):
    steady, fallen = second_moments(kind(normal(1024, 1)), 1024)
    assert steady == pytest.approx(1, abs=0.05)
    assert fallen == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("kind", "error_allowed"), [(Bf16State, 0.03), (Int8State, 0.1)])
@pytest.mark.usefixtures("one_thread")
def test_the_way_of_1000_steps_is_that_of_float64(kind, error_allowed):
    size, options = 5003, USUAL | {"weight_decay": 0.0}
    master = normal(size, seed=2)
    rounded, exact = kind(master), Float64State(master)
    mean = normal(size, seed=3, scale=0.003)
    for step in range(1, 1001):
        grad = mean + normal(size, seed=step, scale=0.01)
        rounded.step(grad, step=step, **options)
        exact.step(grad, step=step, **options)
    assert distance(rounded.master, exact.master) < error_allowed * distance(exact.master, master)


@pytest.mark.parametrize("size", [1, 2, 7, 255, 257, 2049, 16384 + 255])
@pytest.mark.parametrize("grad_dtype", [np.uint16, np.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kind", ROUNDED)
def test_the_first_step_is_that_of_fp32_moments_whatever_the_size(kind, grad_dtype, size):
    master, grad = normal(size, seed=1), normal(size, seed=2, scale=0.01)
    if grad_dtype == np.uint16:
        grad = bfloat16_bits(grad)
    rounded, exact = kind(master), SplitState(master)
    rounded.step(grad, step=1, **USUAL)
    exact.step(grad, step=1, **USUAL)
    assert_same_bits(rounded.master, exact.master)
    if kind is Int8State:
        scale = np.repeat(rounded.exp_avg_scales, QUANTUM)[:size]
        assert (np.abs(rounded.first_moment - exact.exp_avg) <= 1.001 * scale).all()
        np.testing.assert_allclose(rounded.second_moment, exact.exp_avg_sq, rtol=2**-3)
    else:
        np.testing.assert_allclose(rounded.second_moment, exact.exp_avg_sq, rtol=2**-7)
        assert np.array_equal(rounded.exp_avg, bfloat16_bits(exact.exp_avg))


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_non_finite_gradient_spoils_its_own_weight_only(kind, bad):
    size, spoiled = 1001, [0, 37, 300, 1000]
    state, good = kind(normal(size, seed=4)), kind(normal(size, seed=4))
    for step in range(1, 6):
        grad = normal(size, seed=step, scale=0.01)
        good.step(grad, step=step, **USUAL)
        if step == 2:
            grad[spoiled] = bad
        state.step(grad, step=step, **USUAL)
    assert np.flatnonzero(np.isnan(state.master)).tolist() == spoiled
    rest = np.delete(np.arange(size), spoiled)
    if kind in ROUNDED:
        np.testing.assert_allclose(state.master[rest], good.master[rest], atol=1.5e-3)
    else:
        assert_same_bits(state.master[rest], good.master[rest])


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("changed", [{"lr": 0.0}, {"weight_decay": 0.0}], ids=str)
def test_a_step_that_should_change_no_master_changes_none(kind, changed):
    master = normal(1001, seed=7)
    state = kind(master)
    grad = normal(1001, seed=8) if changed == {"lr": 0.0} else np.zeros(1001, dtype=np.float32)
    for step in range(1, 4):
        state.step(grad, step=step, **USUAL | changed)
    assert_same_bits(state.master, master)
    if changed == {"weight_decay": 0.0}:
        assert not state.exp_avg.any()
        assert not state.exp_avg_sq.any()


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("size_of_grad", [1e-45, 1e-40, 1e-25, 1e15, 1e30])
def test_tiny_and_huge_gradients_leave_finite_masters_that_move_no_farther_than_adam_may(kind, size_of_grad):
    master = normal(600, seed=1)
    state = kind(master)
    for step in range(1, 11):
        grad = normal(600, seed=2, scale=0.01)
        grad[::3] = size_of_grad
        state.step(grad, step=step, **USUAL | {"weight_decay": 0.0})
    # The same gradient ten times: each step moves by lr, or less where rounding holds the second moment up.
    assert np.abs(state.master - master).max() < 1.5 * 10 * USUAL["lr"]


@pytest.mark.parametrize("largest", [2.0**-power for power in range(110, 150, 3)])
def test_a_block_of_tiny_gradients_keeps_their_signs_or_nothing(largest):
    """The inverse of its scale may be more than a float32 holds."""
    grad = (np.linspace(-1, 1, QUANTUM) * largest).astype(np.float32)
    state, exact = Int8State(np.ones(QUANTUM, np.float32)), Fp32State(np.ones(QUANTUM, np.float32))
    for step in range(1, 4):
        state.step(grad, step=step, **USUAL)
        exact.step(grad, step=step, **USUAL)
    moment = state.first_moment
    assert (moment * np.sign(grad) >= 0).all()
    kept = state.exp_avg_scales[0]
    # a code at each step, or all that is less than what the largest code of the smallest scale stands for
    assert (np.abs(moment - exact.exp_avg) <= 3 * (1.01 * kept if kept else 127 * 2.0**-126)).all()
    assert kept > 0 or largest < 2.0**-115
    # a scale is one where its codes are too small for it, not what wraps around below zero
    assert (state.exp_avg_sq_scales >= 0).all()


def test_8_bit_codes_are_right_on_average_and_no_second_moment_is_lost():
    grads = np.array([255, 0, 1e-20, 0.005, 0.02, 0.3, 1, 1.5, 3.7, 10.4, 100.1, 254.6], np.float32)
    blocks, seeds = 500, 40
    grad = np.tile(np.resize(grads, QUANTUM), blocks)
    # At beta2 = 0 the second moment is the gradient's square, at beta1 = 0 the first is the gradient.
    hyper = Hyper(lr=0.0, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.0, step=1)
    first, second = np.zeros(grad.size), np.zeros(grad.size)
    # codes reach 2^32 down from the next above the largest
    lowest = 255**2 * 2.0**-32
    expected = np.where(grads > 0, np.maximum(grads.astype(np.float64) ** 2, lowest), 0)
    for seed in range(seeds):
        state = Int8State(np.zeros(grad.size, np.float32))
        state.step_segments(grad, [Segment(0, grad.size, hyper)], seed=seed)
        first += state.first_moment
        second += state.second_moment
        assert np.array_equal(state.exp_avg_sq > 0, grad > 0)
        allowed = np.where(grad > 0.005, 0.126, 0.6) * state.second_moment
        assert (np.abs(state.second_moment - np.tile(np.resize(expected, QUANTUM), blocks)) <= allowed).all()

    def means(sums):
        by_grad = sums.reshape(blocks, QUANTUM)[:, : QUANTUM // grads.size * grads.size]
        return by_grad.reshape(-1, grads.size).mean(axis=0) / seeds

    # Places of the table are tied over a block: 500 blocks and 40 seeds are some 20,000 draws.
    seen = grads > 0.005
    np.testing.assert_allclose(means(second)[seen], expected[seen], rtol=0.002)
    np.testing.assert_allclose(means(first), grads, atol=0.05)


@pytest.mark.parametrize("largest", [1e-45, 1e-41, 1e-38, 1e-30, 1.0, 1e30, 1.7e38, 3.4e38])
def test_second_moments_of_any_size_come_back(largest):
    grad = np.sqrt(np.float64(largest) * np.array([1.0, 0.5, 1e-3, 1e-6, 0.0])).astype(np.float32)
    hyper = Hyper(lr=0.0, beta1=0.9, beta2=0.0, eps=1e-8, weight_decay=0.0, step=1)
    state = Int8State(np.zeros(grad.size, np.float32))
    state.step_segments(grad, [Segment(0, grad.size, hyper)])
    square = np.minimum(grad.astype(np.float64) ** 2, 2.0**127)
    # below 2^-126 a step of the codes is no longer a part of the value but 2^-129
    np.testing.assert_allclose(state.second_moment, square, rtol=0.126, atol=2.0**-128)
    assert np.isfinite(state.second_moment).all()
