"""Configurations of DeepSpeed: checks of their keys and batch sizes, and translations.

    require_known(config)           refuses unknown keys, which DeepSpeed ignores on the first level
    batch_sizes(config, ranks)      train = micro × accumulation × ranks; two of the three determine the third
    like_zero(stage), from_fsdp()   translate the stages of `labs.zero`, and the settings of PyTorch's `fully_shard`
    to_fsdp(config, parameters)     translates a configuration into settings of `fully_shard`

No function of this file needs DeepSpeed: a configuration is a dictionary, as read from JSON.

Source: DeepSpeed 0.19.8.
"""

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch

TRAIN, MICRO, ACCUMULATION = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
PERSISTS, REUSE, LIVE = "stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_max_live_parameters"
FAR = 1_000_000_000  # parameters: DeepSpeed's default of REUSE and LIVE
NUMBERS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
BUCKET = 1 << 16  # elements.  DeepSpeed's default is 500 million: 2 GB in float32, which every rank allocates at once
# The keys of the first level.  DeepSpeed reads these by name, and never checks for others.
KEYS = {
    *(TRAIN, MICRO, ACCUMULATION, "managed_gradient_accumulation", "optimizer", "scheduler", "dataloader_drop_last"),
    *("fp16", "bf16", "bfloat16", "data_types", "torch_autocast", "amp", "weight_quantization", "sparse_gradients"),
    *("gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
    *("communication_data_type", "seq_parallel_communication_data_type", "disable_allgather", "vocabulary_size"),
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "aio", "compile"),
    *("activation_checkpointing", "checkpoint", "datastates_ckpt", "nebula", "hybrid_engine", "pipeline"),
    *("tensor_parallel", "expert_parallel", "sequence_parallel_size", "use_data_before_expert_parallelism"),
    *("steps_per_print", "log_level", "dump_state", "disable_python_gc", "wall_clock_breakdown", "memory_breakdown"),
    *("timers", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("autotuning", "elasticity", "compression_training", "curriculum_learning", "data_efficiency"),
}

# Keys that change no number of the training: they control how much is sent or held at once, what is printed, and how
# DeepSpeed does its work.
SAYS_NO_NUMBERS = {
    *("steps_per_print", "log_level", "dump_state", "disable_python_gc", "wall_clock_breakdown", "memory_breakdown"),
    *("timers", "flops_profiler", "comms_logger", "tensorboard", "wandb", "csv_monitor", "comet"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "disable_allgather"),
    *(
        f"zero_optimization.{key}"
        for key in (
            *("reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients", "sub_group_size"),
            *(PERSISTS, "stage3_model_persistence_threshold", "stage3_prefetch_bucket_size", "reduce_scatter"),
            *("memory_efficient_linear", "round_robin_gradients", "allgather_partitions", "ignore_unused_parameters"),
            *("stage3_gather_16bit_weights_on_model_save", "offload_param.pin_memory", "offload_optimizer.pin_memory"),
        )
    ),
}
OLDER = {
    "bfloat16": "bf16",
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_use_pin_memory": "pin_memory in offload_param and offload_optimizer",
    "stage3_gather_fp16_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    **{key.removeprefix("stage3_"): key for key in (PERSISTS, REUSE, LIVE, "stage3_prefetch_bucket_size")},
    **{key: f"stage3_{key}" for key in ("model_persistence_threshold", "gather_16bit_weights_on_model_save")},
}


class BatchSizes(NamedTuple):
    """The number of sequences in a step, of sequences in a micro-batch of one rank, and of micro-batches in a step."""

    train: int
    micro: int
    accumulation: int


def require_known(config: Mapping[str, Any], known: Collection[str] = KEYS, where: str = "a configuration") -> None:
    """Raise ValueError for a key that is not in `known`, and for a `config` that is no dictionary."""
    if not isinstance(config, Mapping):
        raise ValueError(f"{where} of DeepSpeed is {config!r}: give a dictionary, such as {{'stage': 2}}")
    for key in config:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            meant = f"did you mean {close[0]!r}?" if close else "take it out"
            raise ValueError(f"{key!r} is no key of {where} of DeepSpeed: {meant}")


def batch_sizes(config: Mapping[str, Any], ranks: int) -> BatchSizes:
    """Return all three batch sizes, computed from the sizes that the configuration has.

    If the accumulation and another size are missing, a step has one micro-batch per rank.  Raises ValueError if the
    given sizes contradict each other, or do not determine the missing ones.
    """
    train, micro, accumulation = (config.get(key) for key in (TRAIN, MICRO, ACCUMULATION))
    for key in (TRAIN, MICRO, ACCUMULATION):
        if key in config and (not isinstance(config[key], int) or config[key] < 1):
            raise ValueError(f"{key} is {config[key]!r}: it must be an integer of 1 or more")
    if train is None and micro is None:
        raise ValueError(f"the configuration has neither {TRAIN} nor {MICRO}: give one of them")
    if micro is None:
        micro = divided(train, (accumulation or 1) * ranks, f"{accumulation or 1} micro-batches on {ranks} ranks")
    if train is None:
        train = micro * (accumulation or 1) * ranks
    if accumulation is None:
        accumulation = divided(train, micro * ranks, f"micro-batches of {micro} on {ranks} ranks")
    if train != micro * accumulation * ranks:
        raise ValueError(
            f"{TRAIN} is {train}, but {micro} sequences × {accumulation} micro-batches × {ranks} ranks are "
            f"{micro * accumulation * ranks}: leave one of the three out, and it follows from the others"
        )
    return BatchSizes(train, micro, accumulation)


def divided(train: int, by: int, what: str) -> int:
    if train % by:
        down, up = train // by * by, -(-train // by) * by
        raise ValueError(f"{TRAIN} {train} cannot be cut into {what}: take {f'{down} or ' * (down > 0)}{up}")
    return train // by


def like_zero(stage: int, bucket: int = BUCKET) -> dict[str, Any]:
    """Return a configuration, without batch sizes, under which DeepSpeed does what `labs.zero` does.

    DeepSpeed's defaults are for models of billions of parameters.  Stage 3 keeps parameters of up to 100,000 elements
    whole, and prefetches 50 million elements.  Stage 3 does not reshard a parameter that is needed again before 1
    billion others, so a small model would be gathered as a whole, once a step.  DeepSpeed also clips gradients to a
    norm of 1 by default.

    bucket: number of elements of gradients that are reduced at once
    """
    zero = {"stage": stage, "reduce_bucket_size": bucket, "overlap_comm": False}
    if stage == 3:
        zero |= dict.fromkeys((PERSISTS, "stage3_prefetch_bucket_size", REUSE), 0)
        zero["memory_efficient_linear"] = False  # True replaces nn.functional.linear in the whole process, for good
    return {"gradient_clipping": 0.0, "zero_optimization": zero}


def from_fsdp(
    reshard_after_forward: bool = True,
    param_dtype: torch.dtype = torch.float32,
    reduce_dtype: torch.dtype | None = None,
    offload: bool = False,
) -> dict[str, Any]:
    """Return a configuration, without batch sizes, that does what `fully_shard` does with these settings.

    DeepSpeed has no setting for `reshard_after_forward`: DeepSpeed leaves a parameter gathered if it is needed again
        soon.

    Raises ValueError for a dtype that DeepSpeed does not train in.
    """
    reduce_dtype = reduce_dtype or param_dtype
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype not in NUMBERS:
            raise ValueError(f"{name} is {dtype}: DeepSpeed trains in {', '.join(map(str, NUMBERS))}")
    config = like_zero(3)
    if not reshard_after_forward:
        config["zero_optimization"] |= dict.fromkeys((REUSE, LIVE), FAR)
    if offload:
        config["zero_optimization"] |= {key: {"device": "cpu"} for key in ("offload_param", "offload_optimizer")}
    if param_dtype != torch.float32:
        config[NUMBERS[param_dtype]] = {"enabled": True}
    if reduce_dtype != param_dtype:
        config["communication_data_type"] = NUMBERS[reduce_dtype]
    return config


def to_fsdp(config: Mapping[str, Any], parameters: int) -> dict[str, Any]:
    """Return the settings of `fully_shard` that train a model of `parameters` elements as this configuration does.

    Each key is translated, or is in SAYS_NO_NUMBERS, or is refused by a ValueError that names all such keys.  Keys
    without a counterpart are refused, and so are "auto", null and older names, which DeepSpeed accepts.  With
    `fully_shard` you need your own code for a loss scale for fp16, and for clipping: without a `gradient_clipping` of
    0, DeepSpeed clips.
    """
    require_known(config)
    zero = config.get("zero_optimization", {})
    require_known(zero, {*zero} if isinstance(zero, Mapping) else (), "zero_optimization in a configuration")
    require_said(config)
    require_kinds(config)
    stage = zero.get("stage", 0)
    if stage != 3:
        raise ValueError(
            f"stage {stage} keeps all parameters on each rank, and fully_shard never does: the nearest is stage 3 with "
            "reshard_after_forward=False, or DDP with ZeroRedundancyOptimizer"
        )
    require_translated(config)
    offloads = {zero.get(f"offload_{what}", {}).get("device", "none") for what in ("param", "optimizer")}
    if "nvme" in offloads or len(offloads) > 1:
        raise ValueError(
            f"parameters and optimizer state are offloaded to {', '.join(sorted(offloads))}: fully_shard has "
            "parameters, gradients and optimizer state on the CPU, or none of them"
        )
    dtypes = {name: dtype for dtype, name in NUMBERS.items()}
    computes = [dtype for name, dtype in dtypes.items() if config.get(name, {}).get("enabled")] or [torch.float32]
    if len(computes) > 1:
        raise ValueError("bf16 and fp16 are both enabled: DeepSpeed computes in one of them, so take out the other")
    return {
        "reshard_after_forward": min(zero.get(REUSE, FAR), zero.get(LIVE, FAR)) < parameters,
        "param_dtype": computes[0],
        "reduce_dtype": dtypes[config.get("communication_data_type", NUMBERS[computes[0]])],
        "offload": offloads == {"cpu"},
    }


def require_said(config: Mapping[str, Any], where: str = "") -> None:
    """Raise ValueError for the values "auto" and null, which other programs fill in, and for keys of older releases."""
    for key, value in config.items():
        if key in OLDER:
            raise ValueError(f"{where}{key} is an older name: say {OLDER[key]}")
        if value is None or value == "auto":
            said = "null" if value is None else "'auto', which Hugging Face's Trainer fills in"
            raise ValueError(f"{where}{key} is {said}: give a value, or take it out")
        if isinstance(value, Mapping):
            require_said(value, f"{where}{key}.")


def require_kinds(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a value of a type that DeepSpeed does not accept under its key."""
    for key, value in flat(config):
        what, fits = TRANSLATED.get(key, ("", bool))
        if what and not fits(value):
            raise ValueError(f"{key} is {value!r}: DeepSpeed takes {what} there")


def require_translated(config: Mapping[str, Any]) -> None:
    """Raise ValueError for keys that `fully_shard` has no setting for."""
    known = {*TRANSLATED, *SAYS_NO_NUMBERS}
    left = [key for key, _ in flat(config) if key not in known and key.partition(".")[0] not in SAYS_NO_NUMBERS]
    if config.get("gradient_clipping") == 0:
        left.remove("gradient_clipping")
    if left:
        raise ValueError(
            f"fully_shard has no setting for {', '.join(left)}: take that out of the configuration, and write what you "
            "need of it as code"
        )


def flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield each key with its outer keys, such as "bf16.enabled", and its value."""
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from ((f"{key}.{rest}", inner) for rest, inner in flat(value))
        elif value != {}:
            yield key, value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


DICTIONARY = "a dictionary, such as {'enabled': true},", lambda value: False
ENABLED = "true or false", lambda value: isinstance(value, bool)
DEVICE = "'none', 'cpu' or 'nvme'", {"none", "cpu", "nvme"}.__contains__
NUMBER = "a number of parameters", is_number
TRANSLATED = {  # key: (the kind of value that DeepSpeed accepts, a test for it)
    **{name: DICTIONARY for name in ("bf16", "fp16")},
    **{f"{name}.enabled": ENABLED for name in ("bf16", "fp16")},
    "communication_data_type": ("'fp32', 'bf16' or 'fp16'", [*NUMBERS.values()].__contains__),
    "zero_optimization.stage": ("an integer", lambda value: type(value) is int),
    **{f"zero_optimization.offload_{what}": DICTIONARY for what in ("param", "optimizer")},
    **{f"zero_optimization.offload_{what}.device": DEVICE for what in ("param", "optimizer")},
    **{f"zero_optimization.{key}": NUMBER for key in (REUSE, LIVE)},
}
