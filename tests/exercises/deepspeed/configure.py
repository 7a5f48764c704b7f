"""Answers to configure (14): a configuration of DeepSpeed from a description."""

from tests.answers import Exercise
from tests.extras import need_deepspeed

answers = Exercise("configure", needs=need_deepspeed)


@answers.right(line="right on all 6 examples, and DeepSpeed takes a step by one of them")
def all_three(batch, most, ranks, clip):
    each = batch // ranks
    micro = max(size for size in range(1, most + 1) if each % size == 0)
    return {
        "train_batch_size": batch,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": each // micro,
        "gradient_clipping": clip or 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 2},
    }


@answers.right
def two_of_three(batch, most, ranks, clip):
    micro = min(most, batch // ranks)
    while batch % (micro * ranks):
        micro -= 1
    config = {"train_batch_size": batch, "train_micro_batch_size_per_gpu": micro, "bfloat16": {"enabled": True}}
    config["gradient_clipping"] = 0 if clip is None else clip
    return config | {"zero_optimization": {"stage": 2, "overlap_comm": True}}


spoil = answers.slips(all_three)
spoil("a key that DeepSpeed does not know", {'"gradient_clipping"': '"max_grad_norm"'})
spoil("batch sizes that do not agree", {"each // micro,": "batch // micro,"})
spoil(
    "clipped, though nobody said so",
    {'"gradient_clipping": clip or 0.0,': '**({"gradient_clipping": clip} if clip else {}),'},
)
spoil("clipped to another norm", {"clip or 0.0,": "clip and 1.0 or 0.0,"})
spoil("a rank takes the whole batch", {'"train_batch_size": batch,': "", "each // micro,": "batch // micro,"})
spoil(
    "a step of fewer sequences", {'"train_batch_size": batch,': "", '"gradient_accumulation_steps": each // micro,': ""}
)
spoil("more than a rank can take", {"range(1, most + 1)": "range(1, each + 1)"})
spoil("smaller micro-batches than need be", {"max(size": "min(size"})
spoil("not in bfloat16", {'"bf16": {"enabled": True},': '"bf16": True,'})
spoil("another stage", {'{"stage": 2}': '{"stage": 3}'})
