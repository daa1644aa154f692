"""The keys of DeepSpeed's JSON, dotted: what they may hold, their values checked, and for those that change
nothing here, why.

The keys are those of DeepSpeed's documentation (docs/_pages/config-json.md) and of the classes that read
them, as of version 0.19, with the deprecated ones that it still takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamer.config_values import BETAS, FLAG, NOT_NEGATIVE, Kind, nearest, number, string

ONE_GPU = "there is one GPU: nothing is communicated"
MASTERS = "AdamW keeps exact fp32 masters"
UPDATE = "streamer.AdamW makes the update"
_UNITS = "whole layers are fetched, the next one while one computes; wrap(num_slots=...) says how many"
_ROOT = "what is in no layer stays on the device; a layer's small parameters come and go with it"
_NVME = "layers and optimizer state are in host memory, not on an NVMe drive"
_CHECKPOINTS = "streamer.load reads what streamer.save wrote, which has the fp32 weights"
_STATS = "streamer.stats(model) has a step's figures, streamer.save_trace(model, path) its timeline"
_MONITOR = "the loop logs: streamer.stats(model) has figures for it"
_DATA = "the loop chooses and orders its batches"
_MODEL = "the model runs as it is"

#: By table: a reason, and the keys of which it is that of every value but false and null.
_LOST: dict[str, dict[str, str]] = {
    "": {
        ONE_GPU: "allgather_size communication_data_type disable_allgather gradient_allreduce_op "
        "gradient_predivide_factor prescale_gradients seq_parallel_comm_data_type "
        "seq_parallel_communication_data_type sequence_parallel_size use_data_before_expert_parallelism",
        "the loop counts batches, and calls step() when enough are added up": "managed_gradient_accumulation",
        "the loop reads the data: DataLoader(drop_last=True)": "dataloader_drop_last",
        "the loop prints what it wants; streamer only warns": "steps_per_print log_level dump_state",
        _STATS: "wall_clock_breakdown memory_breakdown",
        "garbage collection is left as it is: call gc.disable()": "disable_python_gc",
        _MODEL: "vocabulary_size",
        "no CUDA graphs are captured; wrap(compile=True) fuses kernels": "graph_harvesting",
        "any optimizer of torch.optim works on a wrapped model": "zero_allow_untested_optimizer",
        UPDATE: "zero_force_ds_cpu_optimizer",
        "gradients of embeddings are as PyTorch makes them: nn.Embedding(sparse=True)": "sparse_gradients",
    },
    "optimizer": {UPDATE: "legacy_fusion"},
    "optimizer.params": {UPDATE: "torch_adam fused foreach capturable differentiable set_grad_none"},
    "fp16": {
        "GradScaler halves its scale at every overflow": "consecutive_hysteresis",
        "wrap moves inputs to the device and does not cast them: the loop may": "auto_cast",
        MASTERS: "fp16_master_weights_and_grads",
        UPDATE: "fused_mode",
    },
    "bf16": {
        f"{MASTERS}: the bf16 weight and 2 bytes more": "bf16_master_weights_and_grads",
        "gradients are added up as they reach the host": "immediate_grad_update",
    },
    "data_types": {
        "wrap(dtype=...) is that of fp16.enabled and bf16.enabled": "param_dtype",
        "buffers keep their dtype": "buffer_dtype",
    },
    "zero_optimization": {
        ONE_GPU: "allgather_partitions allgather_bucket_size overlap_comm reduce_scatter reduce_bucket_size "
        "use_multi_rank_bucket_allreduce round_robin_gradients use_all_reduce_for_fetch_params "
        "stage3_use_all_reduce_for_fetch_params allgather_sequential stage3_allgather_sequential "
        "zero_hpz_partition_size zero_quantized_weights zero_quantized_gradients zeropp_loco_param "
        "mics_shard_size mics_hierarchical_params_gather",
        "nothing is partitioned on one GPU": "legacy_stage1",
        "frozen weights are held in wrap's dtype": "zero_quantized_nontrainable_weights",
        "the norm of all gradients is known when backward ends, at no cost": "compute_grad_norm",
        "parameters are aligned in their layer's buffer as it is": "parameter_alignment",
        "the update goes layer by layer": "sub_group_size",
        _UNITS: "prefetch_bucket_size stage3_prefetch_bucket_size max_live_parameters "
        "stage3_max_live_parameters max_reuse_distance stage3_max_reuse_distance leaf_module "
        "module_granularity_threshold stage3_module_granularity_threshold",
        _ROOT: "param_persistence_threshold stage3_param_persistence_threshold model_persistence_threshold "
        "stage3_model_persistence_threshold",
        "model.state_dict() is whole always": "gather_16bit_weights_on_model_save "
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        "a model moves to host memory a layer at a time": "partition_stream_chunk_size "
        "stage3_partition_stream_chunk_size",
        _CHECKPOINTS: "load_from_fp32_weights elastic_checkpoint pipeline_loading_checkpoint",
        _MODEL: "memory_efficient_linear override_module_apply",
        "wrap and AdamW check what they are given always": "enable_sanity_checks log_trace_cache_warnings",
        "Muon is not the optimizer": "save_muon_momentum_buffer_in_memory",
    },
    "zero_optimization.offload_param": {_NVME: "nvme_path buffer_count buffer_size max_in_cpu"},
    "zero_optimization.offload_optimizer": {
        "moments never leave the host, and need no pinning": "pin_memory",
        _NVME: "nvme_path buffer_count pipeline pipeline_read pipeline_write fast_init",
        "updates run under the next forward as it is": "super_offload",
        "wrap(host_threads=...) says how many threads update": "cpuadam_cores_perc",
        "gradients are widened in the pass that updates": "convert_grad_on_cpu",
    },
}

#: The reason for each of those keys, by its dotted name.
REASONS = {
    f"{table}.{name}".lstrip("."): reason
    for table, reasons in _LOST.items()
    for reason, names in reasons.items()
    for name in names.split()
}


@dataclass(frozen=True)
class Section:
    """A table of which nothing is honoured; ``names`` are its keys, None where they are not DeepSpeed's own
    (names of layers, arguments that it passes on) or lie deeper."""

    reason: str
    names: frozenset[str] | None = None


def _section(reason: str, names: str = "") -> Section:
    return Section(reason, frozenset(names.split()) or None)


SECTIONS: dict[str, Section] = {
    "activation_checkpointing": _section(
        'wrap(activations="recompute") keeps the inputs of layers, "recompute+offload" lets them wait in '
        'host memory (cpu_checkpointing), "keep" keeps all that backward needs',
        "partition_activations cpu_checkpointing contiguous_memory_optimization number_checkpoints "
        "synchronize_checkpoint_boundary profile",
    ),
    "aio": _section(
        _NVME,
        "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
    ),
    "amp": _section('Apex is not used: write "bf16" or "fp16", or use torch.autocast in the loop'),
    "autotuning": _section(
        "nothing is tried out: wrap and AdamW say, with figures, what does not fit",
        "enabled fast results_dir exps_dir overwrite start_profile_step end_profile_step metric metric_path "
        "tuner_type tuner_early_stopping tuner_num_trials arg_mappings max_train_batch_size "
        "min_train_batch_size max_train_micro_batch_size_per_gpu min_train_micro_batch_size_per_gpu "
        "num_tuning_micro_batch_sizes mp_size model_info model_info_path",
    ),
    "checkpoint": _section("streamer.save(model, optimizer, path) and streamer.load are the checkpoints"),
    "comet": _section(
        _MONITOR,
        "enabled workspace project samples_log_interval experiment_name api_key experiment_key online mode",
    ),
    "comms_logger": _section(ONE_GPU, "enabled verbose prof_all debug prof_ops"),
    "compile": _section("wrap(compile=True) passes the layers through torch.compile"),
    "compression_training": _section("weights and activations are neither quantized nor pruned"),
    "csv_monitor": _section(_MONITOR, "enabled output_path job_name"),
    "curriculum_learning": _section(_DATA),
    "data_efficiency": _section(f"{_DATA}, and layers see all tokens"),
    "datastates_ckpt": _section("streamer.save(block=False) writes while training goes on"),
    "eigenvalue": _section(
        "nothing is quantized by the curvature of layers",
        "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    ),
    "elasticity": _section(
        "one process trains: the batch is that of train_batch_size and its kin",
        "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version "
        "prefer_larger_batch ignore_non_elastic_batch_info model_parallel_size num_gpus_per_node",
    ),
    "expert_parallel": _section(f"{ONE_GPU}, and experts are part of their layer"),
    "flops_profiler": _section(
        f"{_STATS}; torch.utils.flop_counter counts operations",
        "enabled recompute_fwd_factor profile_step module_depth top_modules detailed output_file",
    ),
    "hybrid_engine": _section(
        "the model generates as it trains, through its own forward",
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters "
        "tp_gather_partition_size enable_cuda_graph",
    ),
    "nebula": _section(
        "streamer.save(block=False) writes while training goes on",
        "enabled load_path enable_nebula_load persistent_storage_path persistent_time_interval "
        "num_of_version_in_retention",
    ),
    "pipeline": _section("there is one GPU: no stages"),
    "progressive_layer_drop": _section(f"{_MODEL}: no layer is dropped", "enabled theta gamma"),
    "quantize_training": _section("weights are not quantized; AdamW(state_dtype=...) shortens moments"),
    "sparse_attention": _section(f"{_MODEL}, with its own attention"),
    "tensor_parallel": _section("there is one GPU: layers are not split"),
    "tensorboard": _section(_MONITOR, "enabled output_path job_name"),
    "timers": _section(_STATS, "throughput"),
    "torch_autocast": _section(
        "streamer does not enter it: use torch.autocast around the forward in the loop",
        "enabled dtype lower_precision_safe_modules",
    ),
    "wandb": _section(_MONITOR, "enabled group team project"),
    "weight_quantization": _section("weights are not quantized"),
    "zero_optimization.zenflow": _section(
        "every gradient takes part in the update of its own step",
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc steps_per_epoch",
    ),
}


@dataclass(frozen=True)
class Key:
    """What a key may hold (None: nobody looks), and why a value for which ``is_lost`` changes nothing."""

    kind: Kind | None = None
    reason: str = ""
    is_lost: Callable[[Any], bool] = lambda value: False


def _whole(low: int, high: int | None = None) -> Kind:
    """An integer, which may be written as 1e5."""

    def accepts(value: Any) -> bool:
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        return is_whole and value >= low and (high is None or value <= high)

    words = f"an integer of {low} or more" if high is None else f"an integer from {low} to {high}"
    return Kind(words, accepts, int)


WHOLE, WHOLE_OR_0 = _whole(1), _whole(0)
_TEXT = string("a string that is not empty", r"(?s).+")
_DEVICE = string('"cpu", "nvme" or "none"', "cpu|nvme|none")
_RATIO = number("from 0 to 1", lambda x: 0 <= x <= 1)
_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16"), torch.float16),
}
_DTYPE = Kind('"fp32", "bf16" or "fp16"', lambda x: isinstance(x, str) and x in _DTYPES, _DTYPES.get)


def _is_false(value: Any) -> bool:
    return value is False


def _is_not_cpu(value: Any) -> bool:
    return bool(value != "cpu")


_OFFLOAD = "zero_optimization.offload_"

KEYS: dict[str, Key] = {
    "train_batch_size": Key(WHOLE),
    "train_micro_batch_size_per_gpu": Key(WHOLE),
    "gradient_accumulation_steps": Key(WHOLE),
    "gradient_clipping": Key(NOT_NEGATIVE),
    "optimizer.type": Key(_TEXT),
    "optimizer.params.lr": Key(NOT_NEGATIVE),
    "optimizer.params.betas": Key(BETAS),
    "optimizer.params.eps": Key(NOT_NEGATIVE),
    "optimizer.params.weight_decay": Key(NOT_NEGATIVE),
    "optimizer.params.adam_w_mode": Key(FLAG),
    "optimizer.params.adamw_mode": Key(FLAG),
    "optimizer.params.bias_correction": Key(FLAG),
    "optimizer.params.amsgrad": Key(FLAG),
    "optimizer.params.maximize": Key(FLAG),
    "optimizer.params.max_grad_norm": Key(NOT_NEGATIVE),
    "optimizer.params.fp32_optimizer_states": Key(
        FLAG, "moments are fp32; bf16.bf16_optimizer_states has them in bf16", _is_false
    ),
    "scheduler.type": Key(_TEXT),
    "scheduler.params.warmup_min_lr": Key(NOT_NEGATIVE),
    "scheduler.params.warmup_max_lr": Key(NOT_NEGATIVE),
    "scheduler.params.warmup_min_ratio": Key(NOT_NEGATIVE),
    "scheduler.params.cos_min_ratio": Key(NOT_NEGATIVE),
    "scheduler.params.warmup_num_steps": Key(WHOLE_OR_0),
    "scheduler.params.total_num_steps": Key(WHOLE),
    "scheduler.params.warmup_type": Key(string('"log" or "linear"', "log|linear")),
    "scheduler.params.last_batch_iteration": Key(
        _whole(-1), "a run goes on by the load_state_dict of its schedule", lambda value: bool(value != -1)
    ),
    "fp16.enabled": Key(FLAG),
    "fp16.loss_scale": Key(NOT_NEGATIVE),
    "fp16.initial_scale_power": Key(_whole(0, 127)),
    "fp16.loss_scale_window": Key(WHOLE),
    "fp16.hysteresis": Key(
        WHOLE, "GradScaler halves its scale at the first overflow", lambda value: bool(value > 1)
    ),
    "fp16.min_loss_scale": Key(
        NOT_NEGATIVE, "GradScaler halves its scale without end", lambda value: bool(value > 0)
    ),
    "bf16.enabled": Key(FLAG),
    "bf16.bf16_optimizer_states": Key(FLAG),
    **dict.fromkeys(
        ("bf16.check_grad_overflow", "bf16.check_overflow"),
        Key(FLAG, "AdamW makes no step with gradients that are not finite", _is_false),
    ),
    "data_types.grad_accum_dtype": Key(_DTYPE),
    "zero_optimization.stage": Key(
        _whole(0, 3),
        "layers are paged from host memory, as with stage 3 and offload_param; wrap(num_slots=<number of "
        "layers>) keeps all of them on the device",
        lambda value: bool(value < 3),
    ),
    "zero_optimization.contiguous_gradients": Key(FLAG, "a layer's gradients lie in one buffer", _is_false),
    "zero_optimization.ignore_unused_parameters": Key(
        FLAG, "a parameter without a gradient is left alone, as in PyTorch", _is_false
    ),
    f"{_OFFLOAD}param.device": Key(
        _DEVICE,
        "layers are in host memory: not on an NVMe drive, and on the device only as many as "
        "wrap(num_slots=...) says",
        _is_not_cpu,
    ),
    f"{_OFFLOAD}param.pin_memory": Key(FLAG, "layers are pinned always", _is_false),
    f"{_OFFLOAD}optimizer.device": Key(
        _DEVICE,
        "AdamW keeps its state in host memory and updates there: not on the device, nor on an NVMe drive",
        _is_not_cpu,
    ),
    f"{_OFFLOAD}optimizer.ratio": Key(
        _RATIO, "every parameter is updated on the host", lambda value: bool(value < 1)
    ),
    "zero_optimization.cpu_offload": Key(FLAG, "AdamW keeps its state in host memory", _is_false),
    **dict.fromkeys(
        ("zero_optimization.cpu_offload_param", "zero_optimization.cpu_offload_params"),
        Key(FLAG, "layers are in host memory", _is_false),
    ),
    "zero_optimization.cpu_offload_use_pin_memory": Key(FLAG, "layers are pinned always", _is_false),
    **{name: Key(None, reason, lambda value: value is not False) for name, reason in REASONS.items()},
}


#: Stands in a config for what the training loop knows.
AUTO = "auto"
_NOBODY = object()
#: So many characters of a value are read in an error.
_MOST_SHOWN = 60

#: The tables that have keys of their own.
_TABLES = {name.rpartition(".")[0] for name in KEYS if "." in name} | {"optimizer", "scheduler"}

#: Looks at a table, by its dotted name, before its keys are looked at.
CheckTable = Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Values:
    """A config's values by dotted key, a whole table for those of `SECTIONS`, without nulls and tables that
    are off; and what stands in for those that are "auto" or not there."""

    given: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.given.get(key, AUTO)
        return default if value == AUTO else value

    def is_auto(self, key: str) -> bool:
        return bool(self.given.get(key) == AUTO)

    def pick(self, key: str, name: str, answer: Any, absent: Any, *, auto: Any = _NOBODY) -> Any:
        """The config's value, else the keyword argument ``name``, else ``auto`` or ``absent``."""
        if answer is not None:
            kind = KEYS[key].kind
            assert kind is not None, "somebody looks at it"
            answer = _converted(kind, name, answer)
            if self.get(key, answer) != answer:
                raise contradiction(key, self.given[key], name, answer)
            return answer
        if not self.is_auto(key):
            return self.given.get(key, absent)
        if auto is _NOBODY:
            raise unanswered(key, name)
        return auto

    def lost(self) -> dict[str, str]:
        """The keys that change nothing here, and why."""
        reasons = {}
        for key, value in self.given.items():
            if key in SECTIONS:
                reasons[key] = SECTIONS[key].reason
            # for a key that somebody looks at, "auto" is what there is here
            elif KEYS[key].is_lost(value) and (KEYS[key].kind is None or value != AUTO):
                reasons[key] = KEYS[key].reason
        return reasons


def unanswered(key: str, name: str) -> ValueError:
    return ValueError(f'{key} is "auto": give {name}=... to from_deepspeed_config')


def contradiction(key: str, value: Any, name: str, answer: Any) -> ValueError:
    return ValueError(
        f'{key} is {shown(value)} in the config, and {name}={answer} was given: write "auto" there, or leave '
        "the argument out"
    )


def shown(value: Any) -> str:
    """``value`` in JSON, cut short."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def read(source: Mapping[str, Any] | str | os.PathLike[str], check_table: CheckTable) -> Values:
    """The config of a JSON file, or ``source`` itself.

    Raises ValueError for what is not an object in JSON, a key that is there twice or is not known, and a
    value that its key cannot have; OSError for a file that cannot be read.
    """
    config = _read_json(source)
    if "bfloat16" in config and "bf16" in config:
        raise ValueError("bf16 and bfloat16 are the same: leave one out")
    renamed = {"bf16" if name == "bfloat16" else name: value for name, value in config.items()}
    return Values(dict(_walk(renamed, "", check_table)))


def _read_json(source: Mapping[str, Any] | str | os.PathLike[str]) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if not isinstance(source, str | os.PathLike):
        raise ValueError(f"give a DeepSpeed config as a dict or as a path, not a {type(source).__name__}")
    try:
        config = json.loads(Path(source).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{os.fspath(source)}: not a config in JSON, mend it there: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{os.fspath(source)}: not a config in JSON: it must be an object, in braces")
    return config


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"the key {twice[0]!r} is there twice in one object")
    return dict(pairs)


def _walk(table: Mapping[str, Any], prefix: str, check_table: CheckTable) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = f"{prefix}{name}"
        if key in _TABLES or key in SECTIONS:
            if value is None or value is False:
                continue
            if not isinstance(value, Mapping):
                raise ValueError(f"{key} must be an object, in braces, not {shown(value)}")
            check_table(key, value)
            if key in _TABLES:
                yield from _walk(value, f"{key}.", check_table)
            elif _is_on(key, value):
                yield key, value
        elif key not in KEYS:
            raise _unknown(key, name, prefix)
        elif value is not None:
            kind = KEYS[key].kind
            yield key, value if kind is None or value == AUTO else _converted(kind, key, value)


def _is_on(key: str, table: Mapping[str, Any]) -> bool:
    """Whether a table of which nothing is honoured asks for anything."""
    names = SECTIONS[key].names
    for name in table:
        if names is not None and name not in names:
            raise ValueError(
                f"unknown key '{key}.{name}' in this config; {nearest(str(name), sorted(names))}"
            )
    return bool(table) and table.get("enabled") is not False


def _unknown(key: str, name: str, prefix: str) -> ValueError:
    known = [*KEYS, *SECTIONS, *sorted(_TABLES)]
    if elsewhere := [other for other in known if other.rpartition(".")[2] == name]:
        mend = f"did you mean {elsewhere[0]!r}?"
    else:
        beside = (other.removeprefix(prefix) for other in known if other.startswith(prefix))
        mend = nearest(str(name), dict.fromkeys(other.split(".")[0] for other in beside))
    return ValueError(f"unknown key {key!r} in this config; {mend}")


def _converted(kind: Kind, name: str, value: Any) -> Any:
    value = list(value) if isinstance(value, tuple) else value
    if not kind.accepts(value):
        raise ValueError(f"{name} must be {kind.words}, not {shown(value)}")
    return kind.convert(value)
