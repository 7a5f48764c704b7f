"""Answers to translate (14): fully_shard's settings as a configuration of DeepSpeed."""

import torch

from labs.deepspeed.configuration import from_fsdp
from tests.answers import Exercise
from tests.extras import need_deepspeed

answers = Exercise("translate", needs=need_deepspeed)


@answers.right(line="DeepSpeed and fully_shard send the same bytes in 4 trainings")
def key_by_key(reshard_after_forward, param_dtype, reduce_dtype, offload, max_norm, micro, accumulation):
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_max_reuse_distance": 0 if reshard_after_forward else 10**9,
    }
    if offload:
        zero |= {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    return {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": max_norm or 0.0,
        "bf16": {"enabled": param_dtype == torch.bfloat16},
        "communication_data_type": "bf16" if reduce_dtype == torch.bfloat16 else "fp32",
        "zero_optimization": zero,
    }


@answers.right
def by_the_courses_own(reshard_after_forward, param_dtype, reduce_dtype, offload, max_norm, micro, accumulation):
    config = from_fsdp(reshard_after_forward, param_dtype, reduce_dtype, offload)
    sizes = {"train_batch_size": 2 * micro * accumulation, "gradient_accumulation_steps": accumulation}
    return config | sizes | {"gradient_clipping": 0 if max_norm is None else max_norm}


spoil = answers.slips(key_by_key)
spoil("a key that DeepSpeed does not know", {'"gradient_clipping"': '"max_grad_norm"'})
spoil("batch sizes that do not agree", {'"train_micro_batch_size_per_gpu": micro,': '"train_batch_size": 7,'})
spoil("other batch sizes", {'"gradient_accumulation_steps": accumulation,': ""})
spoil("clipped, though nobody clips", {"max_norm or 0.0": "max_norm or 1.0"})
spoil("clipped to another norm", {"max_norm or 0.0": "max_norm and 2 * max_norm or 0.0"})
spoil("computed in another dtype", {'"bf16": {"enabled": param_dtype == torch.bfloat16},': ""})
spoil("only a part is offloaded", {'"offload_param": {"device": "cpu"}, ': ""})
spoil("on the wrong device", {"if offload:": "if not offload:"})
spoil("whole parameters at rest", {'"stage": 3': '"stage": 2'})
spoil("left gathered from forward to backward", {"0 if reshard_after_forward else 10**9": "10**9"})
spoil("gathered twice, where it could stay", {"0 if reshard_after_forward else 10**9": "0"})
DTYPE = '"communication_data_type": "bf16" if reduce_dtype == torch.bfloat16 else "fp32",'
spoil("gradients travel in another dtype", {DTYPE: ""})
ALL = '"zero_optimization": zero'
WARM = '{"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}'
spoil("another training", {ALL: f'{ALL}, "scheduler": {WARM}'})
spoil("refused by DeepSpeed", {ALL: f'{ALL}, "gradient_predivide_factor": 2.0'})
