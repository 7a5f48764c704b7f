"""Tests of labs.cost's operations against PyTorch's own counter, and against published formulas."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from labs import cost
from labs.model import GPT, PRESETS, Config
from tests.cost.common import CONFIGS


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_matrix_products_as_pytorch_counts_them(config):
    tokens = torch.zeros(2, config.context, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        GPT(config)(tokens, tokens).backward()
    products = config.depth * cost.BOTH * cost.layer_matrices(config) + cost.head_operations(config)
    counted = counter.get_flop_counts()["Global"]
    assert sum(n for op, n in counted.items() if "mm" in str(op)) == products * tokens.numel()


def test_a_model_as_published():
    """Check Megatron-LM's 72 l h² (1 + s/6h + V/12lh) per token of a GPT whose MLP is 4 h wide [arXiv 2104.04473]."""
    h, depth, context, vocab = 1536, 24, 2048, 51_200
    config = Config(vocab, h, depth, 16, 16, 8 * h // 3, context=context)
    published = 72 * depth * h**2 * (1 + context / (6 * h) + vocab / (12 * depth * h))
    assert cost.model_operations(config, context) == pytest.approx(published)


def test_llama_405b_as_its_report_has_it():
    """Check the 3.8e25 operations for 15.6 T tokens [arXiv 2407.21783]."""
    config = PRESETS["llama3-405b"]
    assert cost.model_operations(config, 8192) * 15.6e12 == pytest.approx(3.8e25, rel=0.1)


def test_what_is_computed_again():
    config = PRESETS["tiny"]
    again = [cost.recomputed_operations(config, 64, name) for name in cost.RECOMPUTE]
    forward = cost.layer_operations(config, 64) // 3
    assert again == [0, 0, forward - cost.attention_operations(config, 64) // 3, forward]
    with pytest.raises(ValueError, match="recompute is 'some': it must be one of"):
        cost.recomputed_operations(config, 64, "some")
