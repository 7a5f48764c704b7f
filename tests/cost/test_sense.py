"""Tests of labs.cost.sense: numbers that make no sense are refused in a sentence, without a prediction."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from labs import cost, pp
from labs.cost import Job
from labs.moe import MOE_PRESETS
from tests.cost.common import TINY

# A sensible value for every parameter of every function that `cost` exports.
SENSE = {
    "job": Job(TINY, 2, 2, accumulation=2),
    "config": TINY,
    "link": cost.LINKS["PCIe 5"],
    "plans": pp.plan(pp.gpipe(2, 2)),
    "axes": {"pp": 2, "replicate": 1, "shard": 1, "tp": 1},
    "root": cost.LayerShapes(((4, 3),)),
    "layers": [cost.LayerShapes(((2, 3), (5,)))],
    "step": [cost.Moment("forward", A=1)],
    "sizes": [4, 0, 3],
    "variant": "bucketed",
    "way": "ring",
    "precision": "mixed",
    "recompute": "none",
    "ranks": 4,
    "bandwidth": 1e9,
    "latency": 1e-6,
    "schedule": "1f1b",
    "loads": None,
    "ranks_seconds": [1.0, 2.0],
    **dict.fromkeys(("n", "s", "b", "h", "a", "t", "tokens", "past", "batch", "size", "psi", "card_bytes"), 2),
    **dict.fromkeys(("context", "microbatches", "stages_per_rank", "others", "ep", "experts", "dim"), 2),
    **dict.fromkeys(
        ("rank", "src", "dst", "index", "kept", "P", "S", "A", "G", "comm", "moments", "counter", "edp"), 1
    ),
    **dict.fromkeys(
        ("stage", "itemsize", "accumulation", "replicas", "tp", "bucket", "bucket_bytes", "buffer_bytes"), 2
    ),
    **dict.fromkeys(("memory", "flops"), 1e12),
    **dict.fromkeys(("reshard_after_forward", "sequence_parallel", "find_unused", "offload"), False),
    **dict.fromkeys(("fused_norms", "masters"), True),
}
UNCHECKED = {
    "plans",
    "root",
    "layers",
    "step",
    "variant",
    "way",
    "precision",
    "recompute",
    "schedule",
    "loads",
    "ranks_seconds",
}  # derived from other parameters, or looked up
FUNCTIONS = {name: each for name, each in vars(cost).items() if inspect.isfunction(each) and name != "checked"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_refuses_what_makes_no_sense(name):
    names = inspect.signature(FUNCTIONS[name]).parameters
    given = {name: SENSE[name] for name in names}
    given |= {"layers": [3, 1]} if {"plans", "layers"} <= {*names} else {}
    given |= {"job": Job(MOE_PRESETS["tiny-moe"], 2, 2)} if {"job", "ep"} <= {*names} else {}
    given |= {"loads": [[1, 2], [3, 4]]} if name == "mixture_sent" else {}
    FUNCTIONS[name](**given)
    for name_of_value in names.keys() - UNCHECKED:
        flag, modulo = isinstance(given[name_of_value], bool), name_of_value in ("index", "kept")
        for senseless in (1 if flag else True, 2.5 if modulo else -1, float("nan"), "2", None, [-1]):
            with pytest.raises(ValueError, match=f"^{name_of_value} is .*: .* must be") as raised:
                FUNCTIONS[name](**given | {name_of_value: senseless})
            assert "\n" not in str(raised.value)


JOB, SLOW = Job(TINY, 2, 4), {"latency": 1e-3, "bandwidth": 1e6}


@pytest.mark.parametrize(
    ("predict", "said"),
    [
        (lambda: cost.fsdp(JOB, replicas=3), "replicas is 3: it must divide the number of ranks, 4"),
        (lambda: cost.fsdp(JOB, replicas=0), "replicas is 0: it must be a whole number, and at least 1"),
        (lambda: cost.fsdp(JOB, True, 4, 8), "itemsize is 8: bytes held are predicted only for 2 or 4"),
        (lambda: cost.fsdp(JOB, 2), "reshard_after_forward is 2: it must be True or False"),
        (lambda: cost.fsdp_tp(JOB, 3), "tp is 3: it must divide the number of ranks, 4"),
        (lambda: cost.kv_cache(TINY, 8, itemsize=-2), "itemsize is -2: it must be a whole number, and at least 1"),
        (lambda: cost.all_reduce(-1, 4), "n is -1: it must be a whole number, and at least 0"),
        (lambda: cost.all_reduce(8, 2, 2), "rank is 2: of 2 ranks it must be one of 0 to 1"),
        (lambda: cost.broadcast(8, 2, src=2), "src is 2: of 2 ranks it must be one of 0 to 1"),
        (lambda: cost.ring_seconds(8, 2, **SLOW | {"bandwidth": -1e9}), "bandwidth is -1000000000.0: it must be a num"),
        (lambda: cost.tree_seconds(8, 2, **SLOW | {"bandwidth": 0}), "bandwidth is 0: it must be a number above 0"),
        (lambda: cost.ddp(JOB, "bucketed", 0), "bucket_bytes is 0: it must be a whole number, and at least 1"),
        (lambda: cost.ddp_sent([4, -3], 2, "naive"), "sizes is [4, -3]: it must be whole numbers, each at least 0"),
        (
            lambda: cost.zero_sent([cost.LayerShapes(((2, 3),))], 2, 0),
            "stage 0 is plain data parallelism, which is",
        ),
        (lambda: cost.LayerShapes(((2, -3),)), "trained is ((2, -3),): it must be shapes of whole numbers"),
        (lambda: cost.LayerShapes(uses=0), "uses is 0: it must be a whole number, and at least 1"),
        (lambda: cost.LinkClass(0, 0, 0), "bandwidth is 0: it must be a number above 0"),
        (lambda: Job(TINY, True), "batch is True: it must be a whole number, and at least 1"),
        (lambda: dataclasses.replace(JOB, ranks=2, rank=2), "rank is 2: of 2 ranks it must be one of 0 to 1"),
        (lambda: Job(TINY, 1, fused_norms=1), "fused_norms is 1: it must be True or False"),
        (lambda: cost.expert_parallel(JOB, 2, 2), "edp 2 × ep 2, and config a Config: give a labs.moe.MoEConfig, and"),
        (lambda: cost.expert_parallel(Job(MOE_PRESETS["tiny-moe"], 2, 4), 1, 2), "ranks is 4, with edp 1 × ep 2, and"),
        (lambda: cost.pp(SENSE["job"], SENSE["plans"], [2.0, 2.0]), "stages of [2.0, 2.0] layers: "),
    ],
)
def test_numbers_that_make_no_sense_give_no_prediction(predict, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        predict()


def test_a_formula_says_what_it_is_not_for():
    for predict in (cost.ddp, cost.zero_redundancy, cost.fully_shard):
        with pytest.raises(ValueError, match=r"precision is 'mixed': cost\..* predicts jobs with 'float32' only"):
            predict(Job(TINY, 3, 4, precision="mixed"))
    with pytest.raises(ValueError, match=r"precision is 'mixed, both gradients': cost\.zero predicts jobs with"):
        cost.zero(Job(TINY, 3, 4, precision="mixed, both gradients"), stage=1)
    with pytest.raises(ValueError, match=r"recompute is 'full': cost\.fully_shard predicts jobs with 'none' only"):
        cost.fully_shard(Job(TINY, 3, 4, recompute="full"))
    for predict in (cost.ddp, cost.fsdp, cost.cp, cost.fully_shard):
        with pytest.raises(ValueError, match=r"the model has 8 experts, and cost\..* predicts models without any: use"):
            predict(Job(MOE_PRESETS["tiny-moe"], 4, 4))
    with pytest.raises(ValueError, match="stage 0 is plain data parallelism"):
        cost.zero(Job(TINY, 3, 4), stage=0)


def test_no_function_hides_the_file_that_it_is_in():
    files = [path.stem for path in Path(cost.__file__).parent.glob("*.py") if path.stem != "__init__"]
    assert "job" in files
    assert [name for name in files if not inspect.ismodule(getattr(cost, name))] == []
