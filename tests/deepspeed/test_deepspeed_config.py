"""streamer.from_deepspeed_config: what configs of DeepSpeed read to, what is listed, and each error."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from models.gpt2 import GPT
from streamer.deepspeed.keys import KEYS, SECTIONS
from tests.reference import VOCAB, History, assert_parity, assert_same, streamed, train

ZERO_2 = {
    "train_batch_size": 32,
    "gradient_accumulation_steps": 4,
    "steps_per_print": 100,
    "gradient_clipping": 0.5,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 3e-4, "betas": [0.8, 0.99], "eps": 1e-7, "weight_decay": 0.01, "torch_adam": False},
    },
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 3e-4, "warmup_num_steps": 500}},
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 200},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "contiguous_gradients": True,
    },
    "wall_clock_breakdown": False,
}

#: As with the Hugging Face Trainer: what it knows is "auto".
ZERO_3 = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
TRAINER: dict[str, Any] = {
    "lr": 2e-5,
    "betas": (0.9, 0.95),
    "eps": 1e-6,
    "weight_decay": 0.1,
    "warmup_steps": 10,
    "total_steps": 100,
    "gradient_clipping": 1.0,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 8,
    "dtype": torch.bfloat16,
}

ZERO_INFINITY = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    "data_types": {"grad_accum_dtype": "bf16"},
    "optimizer": {"type": "DeepSpeedCPUAdam", "params": {"lr": 1e-4, "adam_w_mode": False}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True, "ratio": 1.0},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5, "max_in_cpu": 1e9},
        "sub_group_size": 1e8,
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "overlap_events": True},
}


def quietly(config: Any, **answers: Any) -> streamer.DeepSpeedConfig:
    """The config, with its warning about what changes nothing thrown away."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "keys of this DeepSpeed config that change nothing here")
        return streamer.from_deepspeed_config(config, **answers)


def test_the_scaler_of_a_config_that_only_enables_fp16_is_deepspeeds() -> None:
    """PyTorch's own doubles its scale half as often."""
    read = quietly({"fp16": {"enabled": True}})
    assert read.grad_scaler == {"init_scale": 2.0**16, "growth_interval": 1000}


def test_zero_2_offload() -> None:
    read = quietly(ZERO_2)
    assert read.wrap == {"dtype": torch.float16}
    assert read.adamw == {"lr": 3e-4, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.01}
    assert read.gradient_clipping == 0.5
    assert (read.micro_batch_size, read.gradient_accumulation_steps) == (8, 4)
    assert read.grad_scaler == {"init_scale": 4096.0, "growth_interval": 200}
    assert list(read.not_honoured) == [
        "steps_per_print",
        "zero_optimization.stage",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.overlap_comm",
    ]


def test_zero_3_offload_with_auto_everywhere() -> None:
    read = quietly(ZERO_3, **TRAINER)
    assert read.wrap == {"dtype": torch.bfloat16}
    assert read.adamw == {"lr": 2e-5, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    assert read.gradient_clipping == 1.0
    assert (read.micro_batch_size, read.gradient_accumulation_steps) == (2, 8)
    assert read.grad_scaler is None
    assert read.schedule is not None
    assert (read.schedule.max_lr, read.schedule.warmup_steps, read.schedule.total_steps) == (2e-5, 10, 100)
    assert list(read.not_honoured) == [
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ]


def test_zero_infinity() -> None:
    read = quietly(ZERO_INFINITY)
    assert read.wrap == {"dtype": torch.bfloat16, "grad_dtype": None}
    # without weight decay, Adam is AdamW
    defaults = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert read.adamw == {"lr": 1e-4, **defaults, "state_dtype": torch.bfloat16}
    assert (read.micro_batch_size, read.gradient_accumulation_steps) == (1, 1)
    assert read.gradient_clipping is None
    assert read.schedule is None
    assert list(read.not_honoured) == [
        "bf16.bf16_master_weights_and_grads",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_optimizer.nvme_path",
        "zero_optimization.offload_optimizer.pipeline_read",
        "zero_optimization.offload_param.device",
        "zero_optimization.offload_param.nvme_path",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.max_in_cpu",
        "zero_optimization.sub_group_size",
        "aio",
    ]


def test_a_file_reads_as_its_dict_does(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ZERO_3))
    assert quietly(path, **TRAINER) == quietly(str(path), **TRAINER) == quietly(ZERO_3, **TRAINER)


def test_one_warning_has_every_key_that_changes_nothing_behind_its_reason() -> None:
    zero = {"overlap_comm": True, "reduce_bucket_size": 5e8, "sub_group_size": 1e9}
    with pytest.warns(UserWarning) as caught:
        streamer.from_deepspeed_config({"zero_optimization": {"stage": 3, **zero}})
    assert [str(warning.message) for warning in caught] == [
        "keys of this DeepSpeed config that change nothing here:\n"
        "  zero_optimization.overlap_comm, zero_optimization.reduce_bucket_size: there is one GPU: nothing "
        "is communicated\n"
        "  zero_optimization.sub_group_size: the update goes layer by layer"
    ]
    assert caught[0].filename == __file__


def test_what_asks_for_nothing_is_not_listed() -> None:
    config = {
        "zero_optimization": {"offload_param": None, "offload_optimizer": False, "overlap_comm": False},
        "fp16": {"enabled": False, "hysteresis": 2, "auto_cast": True},
        "wandb": {"enabled": False, "project": "p"},
        "tensorboard": None,
        "dump_state": False,
        "aio": {},
        "optimizer": {},
    }
    assert quietly(config) == quietly({})
    assert quietly({}).wrap == quietly({}).adamw == quietly({}).not_honoured == {}


def test_the_old_name_of_bf16() -> None:
    assert quietly({"bfloat16": {"enabled": True}}).wrap == {"dtype": torch.bfloat16}


# every key


#: A value of each key that is honoured, other than the default, beside what it needs.
CHOSEN: dict[str, Any] = {
    "train_batch_size": 6,
    "train_micro_batch_size_per_gpu": 3,
    "gradient_accumulation_steps": 5,
    "gradient_clipping": 0.7,
    "optimizer.type": "AdamW",
    "optimizer.params.lr": 0.5,
    "optimizer.params.betas": [0.1, 0.2],
    "optimizer.params.eps": 1e-3,
    "optimizer.params.weight_decay": 0.2,
    "scheduler.type": "WarmupLR",
    "scheduler.params.warmup_min_lr": 0.1,
    "scheduler.params.warmup_max_lr": 0.2,
    "scheduler.params.warmup_min_ratio": 0.3,
    "scheduler.params.cos_min_ratio": 0.4,
    "scheduler.params.warmup_num_steps": 7,
    "scheduler.params.total_num_steps": 8,
    "scheduler.params.warmup_type": "linear",
    "fp16.enabled": True,
    "fp16.loss_scale": 64,
    "fp16.initial_scale_power": 3,
    "fp16.loss_scale_window": 9,
    "bf16.enabled": True,
    "bf16.bf16_optimizer_states": True,
    "data_types.grad_accum_dtype": "fp32",
}
#: A value of each key that is refused: what AdamW cannot do.
REFUSED: dict[str, Any] = {
    "optimizer.params.adam_w_mode": False,
    "optimizer.params.adamw_mode": False,
    "optimizer.params.bias_correction": False,
    "optimizer.params.amsgrad": True,
    "optimizer.params.maximize": True,
    "optimizer.params.max_grad_norm": 1.0,
}
#: A value of each key of which some are honoured: one that is listed, and one that is not.
PARTLY: dict[str, tuple[Any, Any]] = {
    "optimizer.params.fp32_optimizer_states": (False, True),
    "scheduler.params.last_batch_iteration": (10, -1),
    "fp16.hysteresis": (2, 1),
    "fp16.min_loss_scale": (1, 0),
    "bf16.check_grad_overflow": (False, True),
    "bf16.check_overflow": (False, True),
    "zero_optimization.stage": (2, 3),
    "zero_optimization.contiguous_gradients": (False, True),
    "zero_optimization.ignore_unused_parameters": (False, True),
    "zero_optimization.offload_param.device": ("nvme", "cpu"),
    "zero_optimization.offload_param.pin_memory": (False, True),
    "zero_optimization.offload_optimizer.device": ("none", "cpu"),
    "zero_optimization.offload_optimizer.ratio": (0.3, 1),
    "zero_optimization.cpu_offload": (False, True),
    "zero_optimization.cpu_offload_param": (False, True),
    "zero_optimization.cpu_offload_params": (False, True),
    "zero_optimization.cpu_offload_use_pin_memory": (False, True),
}
_COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 100}}
NEEDED: dict[str, Any] = {
    "optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}},
    "fp16": {"enabled": True},
    "bf16": {"enabled": True},
}


def alone(key: str, value: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A config with ``key`` beside what it needs, and the same without it."""
    table, *path = key.split(".")
    needed = {} if key.endswith((".type", ".enabled")) else NEEDED.get(table, {})
    needed = (
        _COSINE if key in ("scheduler.params.warmup_min_ratio", "scheduler.params.cos_min_ratio") else needed
    )
    without = {table: json.loads(json.dumps(needed))} if path else {}
    config = json.loads(json.dumps(without))
    inner = config
    for name in key.split(".")[:-1]:
        inner = inner.setdefault(name, {})
    inner[key.split(".")[-1]] = value
    return config, without


def every_key() -> Iterator[str]:
    yield from KEYS
    for section in SECTIONS:
        yield section
        yield from (f"{section}.{name}" for name in SECTIONS[section].names or ())


def fault(key: str) -> str:
    """What is wrong with how a key is read; empty if nothing is."""
    if key in REFUSED:
        with pytest.raises(ValueError, match=key.replace(".", r"\.")):
            quietly(alone(key, REFUSED[key])[0])
        return ""
    if key in CHOSEN:
        config, without = alone(key, CHOSEN[key])
        read = quietly(config)
        return "" if not read.not_honoured and read != quietly(without) else "nothing has come of it"
    section = next((name for name in SECTIONS if f"{key}.".startswith(f"{name}.")), None)
    lost, kept = PARTLY.get(key, (7, False))
    if key == section:
        lost = {min(SECTIONS[key].names or ["something"]): 7}
    read = quietly(alone(key, lost)[0])
    if list(read.not_honoured) != [section or key] or len(read.not_honoured[section or key]) < 10:
        return f"not listed, or without a reason: {read.not_honoured}"
    config, without = alone(key, kept)
    return "" if key not in PARTLY or quietly(config) == quietly(without) else "listed where it is honoured"


def test_every_key_is_honoured_refused_or_listed_with_a_reason() -> None:
    keys = list(every_key())
    assert len(keys) > 200
    assert {key: found for key in keys if (found := fault(key))} == {}
    assert {*REFUSED, *CHOSEN, *PARTLY} <= {*keys}


def test_the_examples_of_deepspeeds_documentation_are_known() -> None:
    """Their keys, typed by hand, with values of ours."""
    config = {
        "communication_data_type": "fp16",
        "gradient_predivide_factor": 2.0,
        "amp": {"enabled": True, "opt_level": "O1"},
        "flops_profiler": {"enabled": True, "profile_step": 2, "module_depth": -1, "output_file": None},
        "activation_checkpointing": {"cpu_checkpointing": True, "number_checkpoints": 4, "profile": False},
        "csv_monitor": {"enabled": True, "output_path": "logs", "job_name": "j"},
        "comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}},
        "data_efficiency": {"enabled": True, "data_sampling": {"curriculum_learning": {"enabled": True}}},
        "checkpoint": {"tag_validation": "Warn", "parallel_write": {"pipeline_stage": False}},
        "sparse_attention": {"mode": "fixed", "block": 16},
        "elasticity": {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]},
        "tensor_parallel": {"autotp_size": 4},
    }
    assert list(quietly(config).not_honoured) == list(config)


# the learning rate


def rates(config: dict[str, Any], steps: int, **answers: Any) -> list[float]:
    """The learning rate of each optimizer step."""
    read = quietly(config, **answers)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **read.adamw)
    schedule, made = read.scheduler(optimizer), []
    for _ in range(steps):
        made.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return made


def scheduled(name: str, **params: Any) -> dict[str, Any]:
    return {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "scheduler": {"type": name, "params": params},
    }


def test_a_linear_warm_up_by_hand() -> None:
    config = scheduled(
        "WarmupLR", warmup_min_lr=0.1, warmup_max_lr=0.5, warmup_num_steps=4, warmup_type="linear"
    )
    assert rates(config, 7) == pytest.approx([0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5], rel=1e-15)


def test_a_logarithmic_warm_up_by_hand() -> None:
    config = scheduled("WarmupLR", warmup_num_steps=8)
    thirds = [
        0.0,
        0.0,
        1 / 3,
        math.log2(3) / 3,
        2 / 3,
        math.log2(5) / 3,
        math.log2(6) / 3,
        math.log2(7) / 3,
        1.0,
    ]
    assert rates(config, 10) == pytest.approx([*(0.01 * third for third in thirds), 0.01], rel=1e-15)


@pytest.mark.parametrize("total", [3, 6, 20])
@pytest.mark.parametrize("kind", ["log", "linear"])
def test_decay(kind: str, total: int) -> None:
    low, high, warmup = 1e-4, 2e-3, 6

    def rate(n: int) -> float:
        """After n + 1 steps, as an absolute rate."""
        if n < 0:
            return low
        if n < warmup:
            gamma = math.log(n + 1) / math.log(warmup) if kind == "log" else n / warmup
        else:
            gamma = max(0.0, (total - n) / max(1, total - warmup))
        return low + (high - low) * gamma

    config = scheduled(
        "WarmupDecayLR",
        warmup_min_lr=low,
        warmup_max_lr=high,
        warmup_num_steps=warmup,
        total_num_steps=total,
        warmup_type=kind,
    )
    assert rates(config, 25) == pytest.approx([rate(n) for n in range(-1, 24)], rel=1e-13)


@pytest.mark.parametrize("total", [3, 6, 20])
def test_cosine(total: int) -> None:
    lr, low, end, warmup = 0.01, 0.2, 0.05, 6

    def rate(n: int) -> float:
        if n < 0:
            return 0.0
        if n < warmup:
            return lr * (low + (1 - low) * math.log(n + 1) / math.log(warmup))
        progress = min(1.0, (n - warmup + 1) / max(1, total - warmup))
        return lr * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress)))

    config = scheduled(
        "WarmupCosineLR",
        warmup_min_ratio=low,
        cos_min_ratio=end,
        warmup_num_steps=warmup,
        total_num_steps=total,
    )
    assert rates(config, 25) == pytest.approx([rate(n) for n in range(-1, 24)], rel=1e-13)
    assert rates(config, 25)[-1] == pytest.approx(lr * end, rel=1e-13)


def test_without_a_schedule_the_rate_stays() -> None:
    assert rates({"optimizer": {"type": "AdamW", "params": {"lr": 0.3}}}, 3) == [0.3] * 3


def test_defaults_of_schedules() -> None:
    assert rates(scheduled("WarmupLR"), 1100)[-1] == 0.01, "the optimizer's lr"
    decayed = quietly(scheduled("WarmupDecayLR", total_num_steps=5)).schedule
    assert decayed is not None and (decayed.max_lr, decayed.warmup_steps, decayed.warmup_type) == (
        1e-3,
        1000,
        "log",
    )
    # a warm-up of no steps is one of two, as DeepSpeed's was
    assert rates(scheduled("WarmupLR", warmup_num_steps=0, warmup_type="linear"), 4) == [
        0.0,
        0.0,
        0.005,
        0.01,
    ]


def test_groups_keep_their_own_lr_where_the_config_names_none() -> None:
    params = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    optimizer = torch.optim.SGD([{"params": params[:1], "lr": 0.4}, {"params": params[1:], "lr": 0.8}])
    schedule = quietly(scheduled("WarmupLR", warmup_num_steps=2, warmup_min_lr=0.2)).scheduler(optimizer)
    assert schedule.get_last_lr() == [0.2, 0.2]
    for _ in range(4):
        optimizer.step()
        schedule.step()
    assert schedule.get_last_lr() == [0.4, 0.8]
    at_0 = torch.optim.SGD(params, lr=0.0)
    with pytest.raises(ValueError, match=r"begins at lr 0\.2 and leads to 0: set a higher lr"):
        quietly(scheduled("WarmupLR", warmup_min_lr=0.2)).scheduler(at_0)


def test_a_schedule_goes_on_from_its_state() -> None:
    read = quietly(scheduled("WarmupDecayLR", warmup_num_steps=3, total_num_steps=9))

    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], **read.adamw)
        return optimizer, read.scheduler(optimizer)

    def go(optimizer: Any, schedule: Any, steps: int) -> list[float]:
        made = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            made.append(optimizer.param_groups[0]["lr"])
        return made

    optimizer, schedule = make()
    go(optimizer, schedule, 4)
    saved = json.loads(json.dumps(schedule.state_dict())), optimizer.state_dict()
    expected = go(optimizer, schedule, 4)
    optimizer, schedule = make()
    optimizer.load_state_dict(saved[1])
    schedule.load_state_dict(saved[0])
    assert go(optimizer, schedule, 4) == expected


# training with it


@pytest.fixture(scope="module")
def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, block_size=16, n_layer=2, n_head=2, n_embd=16)


def test_training_by_a_config_is_training_by_hand(gpt: GPT, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ZERO_3))
    answers = TRAINER | {"lr": 1e-3, "warmup_steps": 2, "total_steps": 6, "dtype": torch.float32}
    read = quietly(path, **answers)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any, schedule: Any) -> History:
        return train(model, optimizer, clip, steps=5, schedule=schedule)

    assert read.gradient_clipping is not None
    with streamed(gpt, **read.wrap) as model:
        optimizer: torch.optim.Optimizer = streamer.AdamW(model.parameters(), **read.adamw)
        clip = lambda: streamer.clip_grad_norm_(model, read.gradient_clipping)  # noqa: E731
        by_config = run(model, optimizer, clip, read.scheduler(optimizer))

    by_hand = [0.0, 0.0, 0.5, 1.0, 0.75, 0.5]
    options: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    with streamed(gpt) as model:
        optimizer = streamer.AdamW(model.parameters(), **options)
        clip = lambda: streamer.clip_grad_norm_(model, 1.0)  # noqa: E731
        rate = torch.optim.lr_scheduler.LambdaLR(optimizer, by_hand.__getitem__)
        assert_same(by_config, run(model, optimizer, clip, rate))

    torch.manual_seed(0)
    plain = GPT(vocab_size=VOCAB, block_size=16, n_layer=2, n_head=2, n_embd=16)
    optimizer = torch.optim.AdamW(plain.parameters(), **options)
    clip = lambda: torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)  # noqa: E731
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, by_hand.__getitem__)
    assert_parity(by_config, run(plain, optimizer, clip, rate))


def test_bf16_states_and_sums_reach_wrap_and_adamw(gpt: GPT) -> None:
    read = quietly(ZERO_INFINITY)
    with streamed(gpt, **read.wrap) as model:
        optimizer = streamer.AdamW(model.parameters(), **read.adamw)
        model(torch.zeros(1, 4, dtype=torch.long)).float().sum().backward()
        optimizer.step()
        streamer.synchronize(model)
        assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("overflows", [[False, False, True, False], [True, True, False, False]])
def test_a_static_loss_scale_stays(overflows: list[bool]) -> None:
    arguments = quietly({"fp16": {"enabled": True, "loss_scale": 100}}).grad_scaler
    assert arguments is not None
    scaler = torch.amp.GradScaler("cpu", **arguments, growth_interval=1)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for overflow in overflows:
        weight.grad = torch.full_like(weight, math.inf if overflow else 1.0)
        assert scaler.scale(torch.ones(())).item() == 100.0
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 100.0


# "auto" and answers


@pytest.mark.parametrize(
    "left_out, key",
    [
        ("lr", "optimizer.params.lr"),
        ("warmup_steps", "scheduler.params.warmup_num_steps"),
        ("total_steps", "scheduler.params.total_num_steps"),
        ("gradient_clipping", "gradient_clipping"),
        ("micro_batch_size", "train_micro_batch_size_per_gpu"),
        ("dtype", "fp16.enabled"),
    ],
)
def test_an_auto_that_nobody_answers_names_the_argument(left_out: str, key: str) -> None:
    answers = {name: value for name, value in TRAINER.items() if name != left_out}
    with pytest.raises(ValueError) as raised:
        quietly(ZERO_3, **answers)
    assert str(raised.value) == f'{key} is "auto": give {left_out}=... to from_deepspeed_config'


def test_an_auto_falls_to_deepspeeds_default_where_there_is_one() -> None:
    required = ("lr", "warmup_steps", "total_steps", "gradient_clipping", "micro_batch_size", "dtype")
    read = quietly(ZERO_3, **{name: TRAINER[name] for name in required})
    assert read.adamw == {"lr": 2e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert read.gradient_accumulation_steps == 1


def test_answers_fill_what_the_config_leaves_open() -> None:
    read = quietly({}, **TRAINER)
    assert read.wrap == {"dtype": torch.bfloat16}
    assert read.adamw == {"lr": 2e-5, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    assert (read.gradient_clipping, read.micro_batch_size, read.gradient_accumulation_steps) == (1.0, 2, 8)


def test_pytorchs_default_of_weight_decay_where_its_optimizer_is_asked_for() -> None:
    for name, decay in (("AdamW", 0.01), ("Adam", 0.01)):
        config = {"optimizer": {"type": name, "params": {"torch_adam": True}}}
        assert quietly(config).adamw["weight_decay"] == decay
    l2 = {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "adam_w_mode": False}}}
    assert quietly(l2).adamw["weight_decay"] == 0.0


def test_adamw_is_adamw_whatever_adam_w_mode_says() -> None:
    config = {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1, "adam_w_mode": False}}}
    assert quietly(config).adamw["weight_decay"] == 0.1


@pytest.mark.parametrize(
    "total, micro, accumulation, expected",
    [
        (32, 4, None, (4, 8)),
        (32, None, 4, (8, 4)),
        (None, 4, 8, (4, 8)),
        (32, 4, 8, (4, 8)),
        (32, None, None, (32, 1)),
        (None, 4, None, (4, 1)),
        (None, None, 8, (None, 8)),
        (None, None, None, (None, 1)),
        (32, "auto", 4, (8, 4)),
        (32, 4, "auto", (4, 8)),
        ("auto", 4, 8, (4, 8)),
        ("auto", 4, "auto", (4, 1)),
        (3.2e1, 4.0, None, (4, 8)),
    ],
)
def test_two_batch_sizes_give_the_third(
    total: Any, micro: Any, accumulation: Any, expected: tuple[int | None, int]
) -> None:
    config = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    read = quietly(config)
    assert (read.micro_batch_size, read.gradient_accumulation_steps) == expected


def test_one_dtype_that_is_on_answers_for_the_other() -> None:
    assert quietly({"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}).wrap == {"dtype": torch.bfloat16}


# errors


def within(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


ERRORS: list[tuple[Any, dict[str, Any], str]] = [
    (
        {"zero_optimisation": {}},
        {},
        "unknown key 'zero_optimisation' in this config; did you mean 'zero_optimization'?",
    ),
    (
        within("zero_optimization.overlap_com", True),
        {},
        "unknown key 'zero_optimization.overlap_com' in this config; did you mean 'overlap_comm'?",
    ),
    (
        {"offload_param": {"device": "cpu"}},
        {},
        "unknown key 'offload_param' in this config; did you mean 'zero_optimization.offload_param'?",
    ),
    (within("aio.block", 1), {}, "unknown key 'aio.block' in this config; did you mean 'block_size'?"),
    ({"qqq": 1}, {}, "unknown key 'qqq' in this config; the nearest is '"),
    ({"zero_optimization": True}, {}, "zero_optimization must be an object, in braces, not true"),
    ({"aio": 3}, {}, "aio must be an object, in braces, not 3"),
    (
        within("zero_optimization.stage", 4),
        {},
        "zero_optimization.stage must be an integer from 0 to 3, not 4",
    ),
    (
        within("zero_optimization.offload_param.device", "gpu"),
        {},
        'zero_optimization.offload_param.device must be "cpu", "nvme" or "none", not "gpu"',
    ),
    ({"gradient_clipping": -1}, {}, "gradient_clipping must be a number of 0 or more, not -1"),
    ({"gradient_clipping": math.nan}, {}, "gradient_clipping must be a number of 0 or more, not NaN"),
    (
        {"gradient_clipping": 10**400},
        {},
        "gradient_clipping must be a number of 0 or more, not 1" + "0" * 59 + "...",
    ),
    ({"train_batch_size": 2.5}, {}, "train_batch_size must be an integer of 1 or more, not 2.5"),
    ({"train_batch_size": True}, {}, "train_batch_size must be an integer of 1 or more, not true"),
    (within("fp16.enabled", 1), {}, "fp16.enabled must be true or false, not 1"),
    (
        within("fp16.initial_scale_power", 128),
        {},
        "fp16.initial_scale_power must be an integer from 0 to 127, not 128",
    ),
    (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {},
        "fp16.enabled and bf16.enabled are both true: set one to false",
    ),
    ({"bfloat16": {}, "bf16": {}}, {}, "bf16 and bfloat16 are the same: leave one out"),
    (
        within("bf16.enabled", True),
        {"dtype": torch.float16},
        'bf16.enabled is true in the config, and dtype=torch.float16 was given: write "auto" there, or leave '
        "the argument out",
    ),
    ({}, {"dtype": torch.float64}, "dtype=torch.float64: use torch.float32, torch.bfloat16 or torch.float16"),
    (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
        {},
        "data_types.grad_accum_dtype is torch.float16, and parameters are in torch.bfloat16: gradients are "
        "added up in fp32 or in the dtype that fp16 or bf16 enables",
    ),
    (
        scheduled("WarmupLR"),
        {"lr": 0.1},
        'optimizer.params.lr is 0.01 in the config, and lr=0.1 was given: write "auto" there, or leave '
        "the argument out",
    ),
    ({}, {"betas": (0.9, 1.0)}, "betas must be an array of two numbers in [0, 1), not [0.9, 1.0]"),
    ({}, {"lr": "auto"}, 'lr must be a number of 0 or more, not "auto"'),
    (
        {"optimizer": {"type": "Lamb", "params": {"max_coeff": 10}}},
        {},
        'optimizer.type must be one of Adam, AdamW, FusedAdam, CPUAdam, DeepSpeedCPUAdam, not "Lamb": write '
        '"AdamW", or leave the optimizer section out and make one of torch.optim on the wrapped model',
    ),
    (within("optimizer.type", "AdmaW"), {}, "not \"AdmaW\": did you mean 'AdamW'?"),
    (within("optimizer.params.lr", 1), {}, "optimizer.type must be one of Adam, "),
    (
        {"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}},
        {},
        "optimizer.params.adam_w_mode is false and weight_decay 0.1: AdamW does not add decay to the "
        "gradient; write true, or weight_decay 0, or leave the optimizer section out and make one of "
        "torch.optim on the wrapped model",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        {"weight_decay": 0.1},
        "optimizer.params.adam_w_mode is false and weight_decay 0.1",
    ),
    (
        within("scheduler.type", "OneCycle"),
        {},
        'scheduler.type must be one of WarmupLR, WarmupDecayLR, WarmupCosineLR, not "OneCycle": leave the '
        "section out and make one of torch.optim.lr_scheduler",
    ),
    (
        scheduled("WarmupLR", total_num_steps=9),
        {},
        "scheduler.params.total_num_steps is no parameter of WarmupLR; it is one of WarmupDecayLR, "
        "WarmupCosineLR",
    ),
    (
        scheduled("WarmupLR", warmup_steps=9),
        {},
        "scheduler.params.warmup_steps is no parameter of WarmupLR; did you mean 'warmup_num_steps'?",
    ),
    (
        scheduled("WarmupDecayLR"),
        {},
        "scheduler.params.total_num_steps is missing: set it, or give total_steps=...",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
        {},
        'scheduler.params.warmup_max_lr is "auto": give lr=... to from_deepspeed_config',
    ),
    (
        scheduled("WarmupLR", warmup_type="cosine"),
        {},
        'scheduler.params.warmup_type must be "log" or "linear", not "cosine"',
    ),
    (
        {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
        {},
        "train_batch_size is 64, but train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 1 "
        'GPU is 8: change one of them, or write "auto" for gradient_accumulation_steps',
    ),
    ({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}, {}, "train_batch_size is 10, but "),
    ({"train_batch_size": 3, "train_micro_batch_size_per_gpu": 4}, {}, "train_batch_size is 3, but "),
    ([1], {}, "give a DeepSpeed config as a dict or as a path, not a list"),
]


@pytest.mark.parametrize("config, answers, message", ERRORS, ids=[error[2][:40] for error in ERRORS])
def test_errors(config: Any, answers: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        quietly(config, **answers)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text, message",
    [
        (
            '{"train_batch_size": 1, "train_batch_size": 2}',
            "the key 'train_batch_size' is there twice in one object",
        ),
        ('{"fp16": {"enabled": true, "enabled": true}}', "the key 'enabled' is there twice in one object"),
        ('{"fp16": }', "Expecting value: line 1 column 10"),
        ("[1, 2]", "it must be an object, in braces"),
        ("[" * 100_000, "not a config in JSON"),
    ],
)
def test_files_that_are_no_config(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        quietly(path)
    assert str(raised.value).startswith(str(path))
    assert message in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        quietly(tmp_path / "none.json")
