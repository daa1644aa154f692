"""Why some of DeepSpeed's keys change nothing here: tables of reasons and the keys that each is for.

The keys are those of DeepSpeed's documentation (docs/_pages/config-json.md) and of the classes that read
them, as of version 0.19, with the deprecated ones that it still takes.
"""

from __future__ import annotations

from dataclasses import dataclass

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
