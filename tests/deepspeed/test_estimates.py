"""Tests of labs.deepspeed.estimates against DeepSpeed's own estimators, where installed, and against a real run."""

from dataclasses import replace
from itertools import product

import pytest

from labs import cost
from labs.deepspeed import engine, estimates
from labs.deepspeed.configuration import BUCKET
from labs.deepspeed.estimates import stage2, stage3
from labs.kit.launch import run
from labs.model import GPT, PRESETS
from tests.extras import need_deepspeed

MACHINES = [*product((1, 4, 8), (1, 4))]
OFFLOADED = [(False, False), (True, False), (True, True)]
PSI, LAYER = 70_000_000_000, 8192 * 128_256


def theirs():
    """Return {(devices, nodes, optimizer offloaded, parameters offloaded): (stage 2's, stage 3's)}, device first."""
    engine.imported()
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as third
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as second

    return {
        (*machine, *offloaded): (
            second(PSI, *machine, offloaded[0])[::-1],
            third(PSI, LAYER, *machine, *offloaded)[1::-1],
        )
        for machine, offloaded in product(MACHINES, OFFLOADED)
    }


def test_they_say_what_deepspeeds_say():
    need_deepspeed()
    for (devices, nodes, optimizer, parameters), (second, third) in run(theirs, ranks=1, device="cpu")[0].items():
        assert stage2(PSI, devices, nodes, optimizer) == second
        assert stage3(PSI, LAYER, devices, nodes, optimizer, parameters) == third


def test_70_billion_parameters_on_32_gpus():
    assert round(stage3(PSI, LAYER, 8, 4).device / 2**30, 1) == 40.6
    assert round(stage2(PSI, 8, 4).device / 2**30, 1) == 167.1
    assert stage3(PSI, LAYER, 8, 4, True, True).device == 4 * LAYER
    with pytest.raises(ValueError, match="parameters_offloaded without"):
        stage3(PSI, LAYER, 8, 4, False, True)


def test_activations_are_left_out():
    """Check that more tokens need more memory while the estimate stays; with few it is about right, also in 32 bits."""
    config = replace(PRESETS["tiny"], context=512)
    parameters, largest = estimates.sizes(GPT(config))
    assert parameters == sum(cost.parameter_sizes(config)) and largest == config.vocab * config.dim
    estimated = stage3(parameters, largest, devices=4).device
    few, many = (cost.deepspeed(cost.Job(config, 1, 4, context=T), 3, BUCKET).held for T in (1, 512))
    assert 1.2 * estimated > few.P + few.G + few.S
    assert many.P + many.G + many.S == few.P + few.G + few.S and many.peak > 5 * estimated


def test_an_unknown_stage_is_refused():
    with pytest.raises(ValueError, match=r"stage=0: cost.deepspeed has stages 1, 2 and 3"):
        cost.deepspeed(cost.Job(PRESETS["tiny"], 1, 4), 0, BUCKET)
