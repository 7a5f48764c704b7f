"""A test of the explorers that translate between `fully_shard` and DeepSpeed."""

from labs.kit import play
from labs.kit.explorers.deepspeed_words import in_fsdps_words


def test_a_file_without_a_counterpart_says_why():
    assert "stage 2 keeps all parameters on each rank" in repr(in_fsdps_words(2, 0, "none", True))
    assert "True" in repr(in_fsdps_words(3, 0, "cpu", True))
    assert set(play.to_deepspeed().controls) == {"param_dtype", "reduce_dtype", "reshard_after_forward", "offload"}
    assert set(play.to_fsdp().controls) == {"stage", "reuse", "device", "bf16"}
