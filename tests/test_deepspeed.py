"""streamer.from_deepspeed_config: what configs of DeepSpeed read to, what is warned of, and each error."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import streamer
from tests.reference import History, assert_same, streamed, tiny_gpt, train

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
    "optimizer": {"type": "DeepSpeedCPUAdam", "params": {"lr": 1e-4, "torch_adam": False}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True, "ratio": 1.0},
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5, "max_in_cpu": 1e9},
        "sub_group_size": 1e8,
    },
    "aio": {"block_size": 262144, "queue_depth": 32, "overlap_events": True},
}


def quietly(config: Any, **answers: Any) -> streamer.DeepSpeedConfig:
    """The config, without the warning about keys that are not honoured."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "keys of this DeepSpeed config that ")
        return streamer.from_deepspeed_config(config, **answers)


def test_zero_2_offload() -> None:
    read = quietly(ZERO_2)
    assert read.wrap == {"dtype": torch.float16}
    assert read.adamw == {"lr": 3e-4, "betas": (0.8, 0.99), "eps": 1e-7, "weight_decay": 0.01}
    assert read.gradient_clipping == 0.5
    assert (read.micro_batch_size, read.gradient_accumulation_steps) == (8, 4)
    assert read.grad_scaler == {"init_scale": 4096.0, "growth_interval": 200}
    assert [*read.not_honoured] == [
        "steps_per_print",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.contiguous_gradients",
    ]


def test_zero_3_offload_with_auto_everywhere() -> None:
    read = quietly(ZERO_3, **TRAINER)
    assert read.wrap == {"dtype": torch.bfloat16}
    assert read.adamw == {"lr": 2e-5, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    assert read.gradient_clipping == 1.0
    assert (read.micro_batch_size, read.gradient_accumulation_steps) == (2, 8)
    assert read.grad_scaler is None
    assert read.schedule is not None
    highest, total = read.schedule["warmup_max_lr"], read.schedule["total_num_steps"]
    assert (highest, read.schedule["warmup_num_steps"], total) == (2e-5, 10, 100)
    assert [*read.not_honoured] == [
        "fp16.hysteresis",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    ]


def test_zero_infinity() -> None:
    read = quietly(ZERO_INFINITY)
    assert read.wrap == {"dtype": torch.bfloat16, "disk": "/nvme"}
    assert read.adamw == {"lr": 1e-4, "weight_decay": 0.0}
    assert (read.micro_batch_size, read.gradient_accumulation_steps) == (1, 1)
    assert read.gradient_clipping is None
    assert read.schedule is None
    assert [*read.not_honoured] == [
        "bf16.bf16_master_weights_and_grads",
        "bf16.bf16_optimizer_states",
        "data_types",
        "zero_optimization.offload_optimizer.pipeline_read",
        "zero_optimization.offload_optimizer.ratio",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.max_in_cpu",
        "zero_optimization.sub_group_size",
        "aio",
    ]


NVME = {"device": "nvme", "nvme_path": "/a"}
CPU_WITH_PATH = {"device": "cpu", "nvme_path": "/a"}


@pytest.mark.parametrize(
    ("optimizer", "param", "wrapped", "not_honoured"),
    [
        (NVME, {}, {"disk": "/a"}, []),
        (NVME, {**NVME, "nvme_path": "/b"}, {"disk": ["/a", "/b"]}, []),
        (NVME, CPU_WITH_PATH, {"disk": "/a"}, ["offload_param.nvme_path"]),
    ],
)
def test_what_is_to_be_on_nvme_goes_to_disk(
    optimizer: dict[str, Any], param: dict[str, Any], wrapped: dict[str, Any], not_honoured: list[str]
) -> None:
    read = quietly({"zero_optimization": {"offload_optimizer": optimizer, "offload_param": param}})
    assert read.wrap == wrapped
    assert [key.removeprefix("zero_optimization.") for key in read.not_honoured] == not_honoured


def test_a_file_reads_as_its_dict_does(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(ZERO_3))
    assert quietly(path, **TRAINER) == quietly(str(path), **TRAINER) == quietly(ZERO_3, **TRAINER)


def test_one_line_names_every_key_that_is_not_honoured() -> None:
    config = {
        "sparse_attention": {"mode": "fixed", "block": 16},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "reduce_bucket_size": 5e8,
            "zenflow": {"a": 1},
        },
        "new_in_a_later_deepspeed": 7,
    }
    with pytest.warns(UserWarning) as caught:
        streamer.from_deepspeed_config(config)
    assert [str(warning.message) for warning in caught] == [
        "keys of this DeepSpeed config that have no effect with streamer: sparse_attention, "
        "zero_optimization.overlap_comm, zero_optimization.reduce_bucket_size, zero_optimization.zenflow, "
        "new_in_a_later_deepspeed"
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
    assert quietly({}).wrap == quietly({}).adamw == {}
    assert quietly({}).not_honoured == ()


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


LINEAR = {"warmup_min_lr": 0.1, "warmup_max_lr": 0.5, "warmup_type": "linear"}
COSINE = {"warmup_min_ratio": 0.2, "cos_min_ratio": 0.05}


def in_logarithms(low: float, high: float, warmup: int) -> list[float]:
    return [low + (high - low) * math.log(n, warmup) for n in range(1, warmup + 1)]


def as_a_cosine(low: float, high: float, steps: int) -> list[float]:
    return [low + (high - low) * (1 + math.cos(math.pi * n / steps)) / 2 for n in range(1, steps + 1)]


@pytest.mark.parametrize(
    "name, params, expected",
    [
        ("WarmupLR", LINEAR | {"warmup_num_steps": 4}, [0.1, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5]),
        ("WarmupLR", {"warmup_num_steps": 8}, [0.0, *in_logarithms(0.0, 0.01, 8), 0.01]),
        (
            "WarmupDecayLR",
            LINEAR | {"warmup_num_steps": 2, "total_num_steps": 6},
            [0.1, 0.1, 0.3, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1],
        ),
        (
            "WarmupCosineLR",
            COSINE | {"warmup_num_steps": 6, "total_num_steps": 10},
            [0.0, *in_logarithms(0.002, 0.01, 6), *as_a_cosine(0.0005, 0.01, 4), 0.0005],
        ),
    ],
)
def test_rates_by_hand(name: str, params: dict[str, Any], expected: list[float]) -> None:
    assert rates(scheduled(name, **params), len(expected)) == pytest.approx(expected, rel=1e-13)


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


# training with it


def test_training_by_a_config_is_training_by_hand(tmp_path: Path) -> None:
    gpt = tiny_gpt(layers=2, width=16)
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


# "auto" and answers


@pytest.mark.parametrize(
    "left_out, key",
    [
        ("lr", "optimizer.params.lr"),
        ("total_steps", "scheduler.params.total_num_steps"),
        ("micro_batch_size", "train_micro_batch_size_per_gpu"),
        ("dtype", "fp16.enabled"),
    ],
)
def test_an_auto_without_an_answer_names_the_argument(left_out: str, key: str) -> None:
    answers = {name: value for name, value in TRAINER.items() if name != left_out}
    with pytest.raises(ValueError) as raised:
        quietly(ZERO_3, **answers)
    assert str(raised.value) == f'{key} is "auto": pass {left_out}=... to from_deepspeed_config'


def test_answers_fill_what_the_config_leaves_open() -> None:
    read = quietly({}, **TRAINER)
    assert read.wrap == {"dtype": torch.bfloat16}
    assert read.adamw == {"lr": 2e-5, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    assert (read.gradient_clipping, read.micro_batch_size, read.gradient_accumulation_steps) == (1.0, 2, 8)


@pytest.mark.parametrize(
    "total, micro, accumulation, expected",
    [
        (32, 4, None, (4, 8)),
        (32, None, 4, (8, 4)),
        (32, None, None, (32, 1)),
        (None, None, None, (None, 1)),
        ("auto", 4, "auto", (4, 1)),
        (3.2e1, 4.0, None, (4, 8)),
    ],
)
def test_two_batch_sizes_give_the_third(
    total: Any, micro: Any, accumulation: Any, expected: tuple[int | None, int]
) -> None:
    sizes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulation}
    read = quietly({"train_batch_size": total, **sizes})
    assert (read.micro_batch_size, read.gradient_accumulation_steps) == expected


def test_dtypes_of_parameters() -> None:
    bf16 = {"dtype": torch.bfloat16}
    assert quietly({"bfloat16": {"enabled": True}}).wrap == bf16, "the old name"
    one_is_on = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": True}}
    assert quietly(one_is_on).wrap == bf16, "it answers for the other"
    # the scaler is DeepSpeed's: PyTorch's own doubles its scale half as often
    scaler = quietly({"fp16": {"enabled": True}}).grad_scaler
    assert scaler == {"init_scale": 2.0**16, "growth_interval": 1000}


# errors


def within(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value  # type: ignore[no-any-return]


BATCH = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
ERRORS: dict[str, tuple[Any, dict[str, Any]]] = {
    'offload_param.device is "nvme": set zero_optimization.offload_param.nvme_path': (
        within("zero_optimization.offload_param.device", "nvme"),
        {},
    ),
    "fp16.enabled and bf16.enabled are both true: set one to false": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        {},
    ),
    "optimizer.type must be one of Adam, AdamW, FusedAdam, CPUAdam, DeepSpeedCPUAdam, not 'Lamb'": (
        within("optimizer.type", "Lamb"),
        {},
    ),
    "scheduler.type must be one of WarmupLR, WarmupDecayLR, WarmupCosineLR, not 'OneCycle'": (
        within("scheduler.type", "OneCycle"),
        {},
    ),
    "scheduler.params.total_num_steps is missing: set it, or pass total_steps=...": (
        scheduled("WarmupDecayLR"),
        {},
    ),
    'scheduler.params.warmup_max_lr is "auto": pass lr=... to from_deepspeed_config': (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}},
        {},
    ),
    "warmup_type must be one of log, linear, not 'cosine'": (scheduled("WarmupLR", warmup_type="cosine"), {}),
    "train_batch_size is 64, but train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 1 GPU is "
    '8: change one of them, or write "auto" for gradient_accumulation_steps': (BATCH, {}),
    **{
        f"optimizer.params.{name} is {value}, which AdamW does not do": (
            {"optimizer": {"type": "Adam", "params": {name: value}}},
            {},
        )
        for name, value in {
            "amsgrad": True,
            "maximize": True,
            "bias_correction": False,
            "adam_w_mode": False,
        }.items()
    },
    "bf16.enabled is True in the config, and dtype is torch.float16: leave one out": (
        within("bf16.enabled", True),
        {"dtype": torch.float16},
    ),
    "optimizer.params.lr is 0.01 in the config, and lr is 0.1: ": (scheduled("WarmupLR"), {"lr": 0.1}),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message: str) -> None:
    config, answers = ERRORS[message]
    with pytest.raises(ValueError) as raised:
        quietly(config, **answers)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "text, message", [('{"fp16": }', "Expecting value"), ("[1, 2]", "not a DeepSpeed config")]
)
def test_files_that_are_no_config(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as raised:
        quietly(path)
    assert str(raised.value).startswith(str(path))
