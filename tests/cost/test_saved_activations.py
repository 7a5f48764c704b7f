"""Tests of labs.cost on one device's memory: published tables, the model's parameters, and what autograd saves."""

import pytest
import torch

from labs import cost
from labs.cost import Job
from labs.model import GPT, PRESETS
from tests.cost.common import CONFIGS


def test_the_pie_is_the_published_one():
    totals = {name: sum(kinds.values()) for name, kinds in cost.PIE.items()}
    assert list(totals.values()) == [16, 16, 18, 20]
    # ZeRO, figure 1: 7.5B parameters, K = 12: 120 GB without sharding
    mixed = cost.PIE["mixed"]
    assert mixed["S"] == 12 and 7.5 * sum(mixed.values()) == 120


def test_parameters_are_the_published_ones():
    counts = {name: sum(cost.parameter_sizes(config)) for name, config in PRESETS.items()}
    assert counts["llama3-8b"] == 8_030_261_248
    assert counts["llama3-70b"] == 70_553_706_496
    assert counts["llama3-405b"] == 405_853_388_800


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_sizes_and_optimizer_state_are_the_models(name):
    model = GPT(CONFIGS[name])
    sizes = cost.parameter_sizes(CONFIGS[name])
    assert sizes == [p.numel() for p in model.parameters()]
    optimizers = {
        torch.optim.AdamW(model.parameters()): cost.optimizer_state(sizes),
        torch.optim.SGD(model.parameters(), lr=0.1): cost.optimizer_state(sizes, moments=0, counter=0),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9): cost.optimizer_state(sizes, 1, 0),
    }
    for optimizer, predicted in optimizers.items():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values()]
        assert sum(value.nbytes for value in state if torch.is_tensor(value)) == predicted


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("batch, context", [(1, None), (3, None), (2, 7), (3, 1), (1, 1)])
def test_activations_are_what_autograd_saves(name, batch, context):
    config = CONFIGS[name]
    model = GPT(config)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}  # saved tensors by address, alive until they are counted

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    tokens, targets = torch.randint(0, config.vocab, (2, batch, context or config.context)).unbind()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens.clone(), targets.clone())
    measured = sum(storage.nbytes() for storage in saved.values())
    assert sum(cost.activations(Job(config, batch, context=context)).values()) == measured
