"""Tests of labs.moe.moe_gpt."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

from labs.kit.launch import run
from labs.memory.recompute import recompute
from labs.model import GPT
from labs.moe import MOE_PRESETS, MoEGPT, active_parameters, balance_biases, dropped, parameters

TINY = MOE_PRESETS["tiny-moe"]
SMALL = replace(TINY, vocab=13, dim=16, depth=2, heads=2, kv_heads=1, hidden=6, context=12, experts=5)


def batch(config, seed=0, rows=4):
    x = torch.randint(config.vocab, (rows, config.context + 1), generator=torch.Generator().manual_seed(seed))
    return x[:, :-1], x[:, 1:]


def test_mixtral_and_qwen_have_as_many_parameters_as_published():
    """Compare with Jiang et al. 2024, arXiv 2401.04088, section 1: 47B parameters, of which a token uses 13B; and with
    the Qwen team's 30.5B and 3.3B for Qwen3-30B-A3B.
    """
    qwen = MOE_PRESETS["qwen3-30b-a3b"]
    assert [count(qwen) // 100_000_000 for count in (parameters, active_parameters)] == [305, 33]
    mixtral = MOE_PRESETS["mixtral-8x7b"]
    assert (parameters(mixtral), active_parameters(mixtral)) == (46_702_792_704, 12_879_925_248)
    assert parameters(TINY) == sum(p.numel() for p in MoEGPT(TINY).parameters())


def test_what_is_no_expert_starts_as_in_the_gpt_and_every_expert_otherwise():
    ours, dense = dict(MoEGPT(SMALL).named_parameters()), dict(GPT(SMALL).named_parameters())
    same = {name for name in dense if ".mlp." not in name}
    assert same == ours.keys() & dense.keys() and all(torch.equal(ours[name], dense[name]) for name in same)
    downs = [p for name, p in ours.items() if name.endswith("down.weight")]
    assert len(downs) == 10 and len({p.sum().item() for p in downs}) == 10
    assert all(p.std() < 0.05 for p in downs), "what writes into x starts small"


def test_a_loss_can_be_told_what_to_divide_by_and_has_the_balance_loss():
    x, y = batch(SMALL)
    model, without = MoEGPT(SMALL).double(), MoEGPT(replace(SMALL, balance=0.0)).double()
    balance = model(x, y) - without(x, y)
    assert torch.allclose(balance, model(x, y, over=y.numel() / 2) - 2 * without(x, y))
    assert 0.01 * SMALL.depth <= balance < 0.012 * SMALL.depth, "1 per layer, if all are equal"
    assert model(x).shape == (*x.shape, SMALL.vocab)


def learned():
    """Return the first loss, the last, and the number of rows dropped last, of the number of rows."""
    config = replace(TINY, context=8, depth=1, is_biased=True, capacity=2.0)
    model, (x, y) = MoEGPT(config), batch(config, rows=4)
    optimizer, losses = torch.optim.AdamW(model.parameters(), 2e-2), []
    for _ in range(15):
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        balance_biases(model, 1e-3)
        losses.append(loss.item())
    return losses[0], losses[-1], dropped(model), x.numel() * config.top_k


def test_a_small_preset_learns_and_keeps_its_experts_busy():
    [(first, last, rows_dropped, rows)] = run(learned, ranks=1)
    assert last < first - 1 and rows_dropped < 0.3 * rows


def test_recomputation_routes_as_the_forward_did_and_a_used_model_can_be_copied():
    x, y = batch(SMALL)
    model = MoEGPT(SMALL).double()
    deepcopy(model)(x, y).backward()
    model(x, y).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    again = deepcopy(model)
    again.zero_grad()
    recompute(again.layers.values())
    again(x, y).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(again.parameters(), expected, strict=True))


@pytest.mark.parametrize(
    "change, text",
    [
        ({"top_k": 6}, "top_k is 6, and a token can use 1 to 5 of 5 experts: change top_k or experts"),
        ({"top_k": 0}, "top_k is 0, and a token can use 1 to 5"),
        ({"top_k": 1}, "would always be 1, and no gradient would train the router; take scores='softmax before top-k'"),
        ({"scores": "softmax"}, "scores is 'softmax': it must be one of 'softmax before top-k'"),
        ({"capacity": 0.0}, "give a number above 0, such as 1.25, or None to drop no rows"),
        ({"capacity": float("nan")}, "capacity is nan"),
        ({"capacity": float("inf")}, "capacity is inf"),
        ({"shared": -1}, "shared is -1 and balance 0.01: neither can be negative"),
        ({"balance": float("nan")}, "balance nan"),
    ],
)
def test_numbers_of_which_no_model_can_be_built_are_refused(change, text):
    with pytest.raises(ValueError) as error:
        replace(SMALL, **change)
    assert text in str(error.value)


def test_shapes_hold_on_the_meta_device():
    with torch.device("meta"):
        model = MoEGPT(replace(SMALL, shared=2))
    assert isinstance(model, nn.Module) and model.layers["0"].mlp.shared.gate.weight.shape == (12, 16)
