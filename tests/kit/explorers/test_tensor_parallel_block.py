"""Tests of the tensor-parallel explorer: it says what labs.cost says, and draws the slices that labs.tp makes.

References: the table's lines added up by hand against the step's bytes; the shards of a real GPT on each rank; and at
all settings, whether the words stay on the canvas.
"""

import re
import xml.etree.ElementTree as xml
from itertools import product

import pytest
import torch

from labs import cost
from labs.kit import play
from labs.kit.drawing.svg import width_of
from labs.kit.explorers import tensor_parallel_block as explorer
from labs.kit.launch import run
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.tp import gpt_plan, parallelize

CHOICES = explorer.CONTROLS | {"sequence": (512, 131_072)}
ALL = [dict(zip(CHOICES, values, strict=True)) for values in product(*map(list, CHOICES.values()))]
WHOLE, SHARDS = explorer.CONTROLS["x"]


def drawn(**settings):
    return explorer.picture(**settings | {"x": explorer.CONTROLS["x"][settings["x"]]})


def unit(words: str) -> float:
    number, name = words.split()
    return float(number) * {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}[name]


@pytest.mark.parametrize("x", [WHOLE, SHARDS])
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_the_lines_add_up_to_the_step(ranks, x):
    *lines, step = [
        line for line in drawn(**explorer.BEGIN | {"ranks": ranks, "x": x}).text.splitlines() if ":" in line
    ]
    total = 0
    for line in lines:
        times = explorer.DEPTH if line.startswith("a layer") else 1
        for group in re.findall(r"((?:\d+ [a-z-]+(?: and )?)+) of ([\d.]+ \w+)", line):
            total += times * sum(map(int, re.findall(r"\d+", group[0]))) * unit(group[1])
    assert total == pytest.approx(unit(step.split(": ")[1]), rel=0.01)  # all are rounded to three digits


def weights(config):
    model = GPT(config)
    parallelize(model, Mesh((4,), ("tp",)), gpt_plan(config))
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_the_slices_are_those_of_a_real_model():
    config = Config(vocab=13, dim=16, depth=1, heads=4, kv_heads=2, hidden=10, context=8)
    found = {matrix.name: matrix for matrix in explorer.matrices(config, 4)}
    places = {"embedding": "embed.weight", "head": "head.weight"}
    for rank, shapes in enumerate(run(weights, config, ranks=4, device="cpu")):
        for name, matrix in found.items():
            path = places.get(name) or next(path for path in shapes if path.endswith(f".{name}.weight"))
            size = config.head_size if name in "qkvo" else 1
            outputs_first = name != "embedding"  # a Linear's weight is [outputs, inputs]
            assert shapes[path][0 if matrix.by_outputs == outputs_first else 1] == size * matrix.pieces[rank]
    assert (found["k"].copies, found["q"].copies) == (2, 1)


def test_every_setting_draws_a_picture_or_says_why_not():
    refused = set()
    for settings in ALL:
        picture = drawn(**settings)
        root = xml.fromstring(picture.svg)
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            if text.get("text-anchor") == "start":
                end = float(text.get("x")) + width_of(text.text, float(text.get("font-size")))
                assert end <= float(root.get("width")), (settings, text.text)
        refused |= {line for line in picture.text.splitlines() if "cannot be split over" in line}
    assert "4 query heads over 4 of keys and values cannot be split over 8 ranks: use 4" in refused


def test_one_process_sends_nothing():
    text = drawn(**explorer.BEGIN | {"ranks": 1}).text
    assert text.endswith("rank 0 sends in a step: nothing") and "all-reduce" not in text


def test_held_is_what_cost_says():
    config = Config(128_256, 4096, 32, 32, 8, 14336, context=8192)
    peak = cost.tp(cost.Job(config, 1, 4, precision="mixed")).held.peak
    assert f"rank 0 of 4 holds at most {explorer.size(peak)}" in drawn(**explorer.BEGIN).text


def test_it_begins_at_the_given_settings():
    assert play.tensor_parallel(ranks=8, x=SHARDS).settings == explorer.BEGIN | {"ranks": 8, "x": True}


def test_nothing_is_computed(monkeypatch):
    """Check that only labs.cost is used: no model is made."""
    monkeypatch.setattr(torch.nn.Module, "__init__", None)
    assert drawn(**explorer.BEGIN).text
