"""The fused update against torch.optim.AdamW, against float64, and the split layout against the fp32 one."""

import numpy as np
import pytest
import torch

import streamer_native

USUAL = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
BLOCK = 16384


def whole(size, **hyper):
    """One segment over all of `size` elements."""
    return [streamer_native.Segment(0, size, streamer_native.Hyper(**hyper))]


class State:
    """Moments, all float32 [n], of a master that a subclass holds."""

    def __init__(self, master):
        self.exp_avg = np.zeros_like(master)
        self.exp_avg_sq = np.zeros_like(master)

    def step(self, grad, *, grad_scale=1.0, seed=None, **hyper):
        rounding = {} if seed is None else {"seed": seed}
        self.step_segments(grad, whole(grad.size, **hyper), grad_scale=grad_scale, **rounding)


class Fp32State(State):
    """An fp32 master."""

    def __init__(self, master):
        super().__init__(master)
        self.master = master.copy()

    def step_segments(self, grad, segments, **options):
        streamer_native.adamw_fp32(self.master, grad, self.exp_avg, self.exp_avg_sq, segments, **options)


class SplitState(State):
    """A master that is split."""

    def __init__(self, master):
        super().__init__(master)
        self.weight, self.remainder = np.empty((2, master.size), dtype=np.uint16)
        streamer_native.split(master, self.weight, self.remainder)

    def step_segments(self, grad, segments, **options):
        moments = self.exp_avg, self.exp_avg_sq
        streamer_native.adamw_split(self.weight, self.remainder, grad, *moments, segments, **options)

    @property
    def master(self):
        joined = np.empty(self.weight.size, dtype=np.float32)
        streamer_native.join(self.weight, self.remainder, joined)
        return joined


class TorchState:
    """torch.optim.AdamW, its plain single-tensor loop."""

    def __init__(self, master, *, lr, beta1, beta2, eps, weight_decay):
        self.parameter = torch.nn.Parameter(torch.from_numpy(master.copy()))
        self.optimizer = torch.optim.AdamW(
            [self.parameter], lr, (beta1, beta2), eps, weight_decay, foreach=False, fused=False
        )

    def step(self, grad):
        self.parameter.grad = torch.from_numpy(grad)
        self.optimizer.step()

    @property
    def master(self):
        return self.parameter.detach().numpy()

    def moment(self, name):
        return self.optimizer.state[self.parameter][name].numpy()


def normal(size, seed, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def bfloat16_bits(values):
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def widened(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class Float64State:
    """AdamW (Loshchilov and Hutter, 2019) in float64."""

    def __init__(self, master):
        self.master = master.astype(np.float64)
        self.exp_avg, self.exp_avg_sq = np.zeros((2, master.size))

    def step(self, grad, *, step, lr, beta1, beta2, eps, weight_decay):
        grad = grad.astype(np.float64)
        self.master *= 1 - lr * weight_decay
        self.exp_avg += (grad - self.exp_avg) * (1 - beta1)
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * grad * grad
        denominator = np.sqrt(self.exp_avg_sq) / np.sqrt(1 - beta2**step) + eps
        self.master -= lr / (1 - beta1**step) * self.exp_avg / denominator


def distance(one, other):
    return np.sqrt(np.mean((one - other) ** 2))


def assert_same_bits(actual, expected):
    """Equal to the bit, except that any NaN equals any NaN."""
    nan = np.isnan(expected)
    assert np.array_equal(np.isnan(actual), nan)
    assert np.array_equal(actual.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@pytest.mark.parametrize("size", [1, 7, BLOCK, 2 * BLOCK + 5])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"lr": 0.0},
        {"weight_decay": 0.0},
        {"beta1": 0.0},
        {"beta2": 0.0},
        {"beta1": 0.5, "beta2": 0.95, "eps": 1e-3, "lr": 0.03},
    ],
    ids=str,
)
def test_fp32_follows_torch(size, changed):
    options = USUAL | changed
    master = normal(size, seed=1)
    ours, theirs = Fp32State(master), TorchState(master, **options)
    for step in range(1, 21):
        grad = normal(size, seed=step + 100, scale=0.01)
        ours.step(grad, step=step, **options)
        theirs.step(grad)
    # Twenty steps of a few roundings each: of the master's own size, of a step's, and of a moment's.
    atol = 20 * 2**-23 * max(1.0, options["lr"])
    np.testing.assert_allclose(ours.master, theirs.master, rtol=20 * 2**-23, atol=atol)
    np.testing.assert_allclose(ours.exp_avg, theirs.moment("exp_avg"), rtol=1e-5, atol=1e-8)
    np.testing.assert_allclose(ours.exp_avg_sq, theirs.moment("exp_avg_sq"), rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize(
    ("changed", "torch_errors_allowed"),
    # Without decay both are at the rounding of the master itself, and which is nearer is chance: 0.1% here.
    [({}, 0.1), ({"lr": 1e-5}, 0.1), ({"weight_decay": 0.0}, 1.01)],
    ids=str,
)
def test_fp32_is_no_less_accurate_than_torch_over_1000_steps(changed, torch_errors_allowed):
    size = 1003
    options = USUAL | changed
    master = normal(size, seed=2)
    ours, theirs = Fp32State(master), TorchState(master, **options)
    exact = Float64State(master)
    for step in range(1, 1001):
        grad = normal(size, seed=step, scale=0.01)
        ours.step(grad, step=step, **options)
        theirs.step(grad)
        exact.step(grad, step=step, **options)
    our_error, torch_error = (distance(state.master, exact.master) for state in (ours, theirs))
    assert np.abs(ours.master - master).max() > 50 * options["lr"], (
        "nothing was learned, so nothing was compared"
    )
    assert our_error <= torch_error * torch_errors_allowed


@pytest.mark.parametrize("grad_dtype", [np.uint16, np.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("changed", [{}, {"lr": 1e-6}, {"weight_decay": 0.0}, {"grad_scale": 0.37}], ids=str)
def test_split_equals_fp32_to_the_bit(grad_dtype, changed):
    options = USUAL | changed
    size = 2 * BLOCK + 45
    master = normal(size, seed=3)
    master[:4] = [0.0, -0.0, 1e-40, -1e-45]
    fp32, split = Fp32State(master), SplitState(master)
    for step in range(1, 101):
        grad = normal(size, seed=step % 7, scale=10.0 ** (step % 5 - 4))
        grad[8:16] = 0.0
        grad[16:24] = 1e-41
        if step > 50:  # among other elements, in the vector body and in the last few
            grad[[30, -1]] = np.nan
            grad[[31, -2]] = np.inf
            grad[[32, -3]] = 1e30
        if grad_dtype == np.uint16:
            bits = bfloat16_bits(grad)
            split.step(bits, step=step, **options)
            grad = widened(bits)
        else:
            split.step(grad, step=step, **options)
        fp32.step(grad, step=step, **options)
    assert_same_bits(split.master, fp32.master)
    assert_same_bits(split.exp_avg, fp32.exp_avg)
    assert_same_bits(split.exp_avg_sq, fp32.exp_avg_sq)
    assert np.isnan(fp32.master).sum() == 4
    assert not np.array_equal(fp32.master, master)


def test_the_nan_that_gpus_give_stays_nan_in_the_streamed_weight():
    size = 33
    state = SplitState(normal(size, seed=6))
    grad = np.full(size, 0x7FFFFFFF, dtype=np.uint32).view(np.float32)
    state.step(grad, step=1, **USUAL)
    assert np.isnan(widened(state.weight)).all()


@pytest.mark.parametrize("state_type", [Fp32State, SplitState])
def test_grad_scale_multiplies_the_gradient_first(state_type):
    master, grad = normal(1001, seed=9), normal(1001, seed=10)
    scaled, beforehand = state_type(master), state_type(master)
    for step in range(1, 4):
        scaled.step(grad, step=step, grad_scale=0.25, **USUAL)
        beforehand.step(grad * np.float32(0.25), step=step, **USUAL)
    assert_same_bits(scaled.master, beforehand.master)
    assert_same_bits(scaled.exp_avg_sq, beforehand.exp_avg_sq)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"step": 0}, "step=0 must count from 1"),
        ({"beta1": 1.0}, r"beta1=1.0 must lie in \[0, 1\)"),
        ({"beta2": -0.1}, "beta2=-0.1 must lie"),
        ({"lr": -1.0}, "lr=-1.0 must be finite and not negative"),
        ({"eps": float("nan")}, "eps=nan must be finite"),
    ],
)
def test_a_wrong_hyperparameter_is_named(changed, message):
    with pytest.raises(ValueError, match=message):
        Fp32State(np.zeros(4, np.float32)).step(np.zeros(4, np.float32), **USUAL | {"step": 1} | changed)
