"""labs.cost against published figures, cases worked out by hand, and measurements that know nothing of it.

Measured: what `isend` was given by labs.collectives; the tensors that autograd saves, met by its own hook; what
the recorder saw a rank send and hold. All of them equal, and not nearly equal.
"""

import dataclasses
import inspect
import re
from contextlib import nullcontext
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import cost, native, pp
from labs.cost import Job, Traffic
from labs.ddp import Bucketed, Naive, Overlapped
from labs.kit import strategies
from labs.kit.launch import run
from labs.kit.record import mark
from labs.model import GPT, PRESETS, Config
from tests.test_collectives import SIZES, traffic

TINY = PRESETS["tiny"]
CONFIGS = {
    "tiny": TINY,
    "one layer, one head of keys": Config(50, 24, 1, 3, 1, 40, context=20),
    "tied, as many heads of keys": Config(64, 32, 2, 4, 4, 96, context=16, tied=True),
    "one head": Config(50, 16, 2, 1, 1, 20, context=9),
    "wide mlp": Config(291, 30, 1, 3, 3, 220, context=31),
    "two heads of four": Config(50, 8, 1, 2, 1, 20, context=8),
}

# ---- the job ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"config": "tiny"}, "config is 'tiny': it must be a labs.model.Config"),
        ({"batch": 0}, "batch is 0: it must be a whole number, and at least 1"),
        ({"batch": 2.0}, "batch is 2.0: it must be a whole number"),
        ({"ranks": -1}, "ranks is -1: it must be"),
        ({"accumulation": 0}, "accumulation is 0: it must be"),
        ({"context": 0}, "context is 0: it must be"),
        ({"context": 65}, "context is 65, more than the model's 64: shorten it, or give a config with"),
        ({"rank": 4}, "rank is 4: of 4 ranks it must be one of 0 to 3"),
        ({"rank": -1}, "rank is -1: of 4 ranks"),
        ({"precision": "fp8"}, "precision is 'fp8': it must be one of 'float32', 'mixed', "),
        ({"config": Config(50, 12, 1, 6, 2, 20, 8)}, "head size 2 (dim 12 / 6 heads): PyTorch does not fuse attention"),
        ({"recompute": "half"}, "recompute is 'half': it must be one of 'none', 'selective', "),
    ],
)
def test_what_cannot_be_run_is_no_job(given, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        Job(**{"config": TINY, "batch": 3, "ranks": 4} | given)
    assert "\n" not in str(raised.value)


# What makes sense, for every parameter of every function that `cost` hands out.
SENSE = {
    "job": Job(TINY, 2, 2, accumulation=2),
    "config": TINY,
    "link": cost.LINKS["PCIe 5"],
    "plans": pp.plan(pp.gpipe(2, 2)),
    "root": cost.Layer(((4, 3),)),
    "layers": [cost.Layer(((2, 3), (5,)))],
    "step": [cost.Moment("forward", A=1)],
    "sizes": [4, 0, 3],
    "variant": "bucketed",
    "precision": "mixed",
    "recompute": "none",
    "ranks": 4,
    "bandwidth": 1e9,
    "latency": 1e-6,
    **dict.fromkeys(("n", "s", "b", "h", "a", "t", "tokens", "past", "batch", "size", "psi", "card_bytes"), 2),
    **dict.fromkeys(("rank", "src", "dst", "index", "kept", "P", "S", "A", "G", "comm", "moments", "counter"), 1),
    **dict.fromkeys(("stage", "itemsize", "accumulation", "replicas", "tp", "bucket_bytes", "buffer_bytes"), 2),
    **dict.fromkeys(("memory", "flops"), 1e12),
    **dict.fromkeys(("reshard_after_forward", "sequence_parallel", "find_unused", "offload"), False),
    **dict.fromkeys(("fused_norms", "masters"), True),
}
UNCHECKED = {"plans", "root", "layers", "step", "variant", "precision", "recompute"}  # made of what is, or looked up
FUNCTIONS = {name: each for name, each in vars(cost).items() if inspect.isfunction(each) and name != "checked"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_refuses_what_makes_no_sense(name):
    names = inspect.signature(FUNCTIONS[name]).parameters
    given = {name: SENSE[name] for name in names}
    given |= {"layers": [3, 1]} if "plans" in names else {}
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
        (lambda: cost.fsdp(JOB, True, 4, 8), "itemsize is 8: what is held is predicted for 2 and 4 bytes"),
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
            lambda: cost.zero_sent([cost.Layer(((2, 3),))], 2, 0),
            "stage 0 is plain data parallelism, which is",
        ),
        (lambda: cost.Layer(((2, -3),)), "trained is ((2, -3),): it must be shapes of whole numbers"),
        (lambda: cost.Layer(uses=0), "uses is 0: it must be a whole number, and at least 1"),
        (lambda: cost.LinkClass(0, 0, 0), "bandwidth is 0: it must be a number above 0"),
        (lambda: Job(TINY, True), "batch is True: it must be a whole number, and at least 1"),
        (lambda: dataclasses.replace(JOB, ranks=2, rank=2), "rank is 2: of 2 ranks it must be one of 0 to 1"),
        (lambda: Job(TINY, 1, fused_norms=1), "fused_norms is 1: it must be True or False"),
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
    with pytest.raises(ValueError, match="stage 0 is plain data parallelism"):
        cost.zero(Job(TINY, 3, 4), stage=0)


def test_no_function_hides_the_file_that_it_is_in():
    files = [path.stem for path in Path(cost.__file__).parent.glob("*.py") if path.stem != "__init__"]
    assert "job" in files
    assert [name for name in files if not inspect.ismodule(getattr(cost, name))] == []


# ---- collectives -----------------------------------------------------------------------------------------


def test_seven_elements_on_three_ranks_by_hand():
    # pieces of 3, 2 and 2: rank 0 keeps 3, rank 1 keeps 2, rank 2 keeps 2; then each hands on all but its next's
    assert [cost.reduce_scatter(7, 3, r) for r in range(3)] == [Traffic(4, 2), Traffic(5, 2), Traffic(5, 2)]
    assert [cost.all_gather(7, 3, r) for r in range(3)] == [Traffic(5, 2), Traffic(5, 2), Traffic(4, 2)]
    assert [cost.all_reduce(7, 3, r).elements for r in range(3)] == [9, 10, 9]


def test_trees_on_five_ranks_by_hand():
    # 0 tells 1, 2, 4 and 1 tells 3
    assert [cost.broadcast(10, 5, r).elements for r in range(5)] == [30, 10, 0, 0, 0]
    assert [cost.broadcast(10, 5, r, src=3).elements for r in range(5)] == [0, 0, 0, 30, 10]
    assert [cost.reduce(10, 5, r, dst=3).elements for r in range(5)] == [10, 10, 10, 0, 10]
    # 4 folds into 0; 0 and 1, 2 and 3, then 0 and 2, 1 and 3; 0 tells 4
    assert [cost.all_reduce_doubling(10, 5, r).elements for r in range(5)] == [30, 20, 20, 20, 10]
    assert [cost.barrier(ranks).messages for ranks in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_empty_messages_are_not_counted():
    assert [cost.all_reduce(1, 4, r) for r in range(4)] == [Traffic(1, 1), *[Traffic(2, 2)] * 2, Traffic(1, 1)]
    assert cost.all_reduce(0, 4) == cost.broadcast(0, 4) == Traffic(0, 0)


def test_limits_are_the_published_ones():
    # ring: all-gather = reduce-scatter = (N-1)/N S; all-reduce 2 (N-1)/N S, exact where N divides
    for ranks in (1, 2, 4, 8):
        n = 64 * ranks
        assert cost.reduce_scatter(n, ranks).elements == cost.all_gather(n, ranks).elements
        assert cost.all_reduce(n, ranks).elements == cost.all_reduce_limit(n, ranks)
    assert cost.all_reduce_limit(7, 3) == Fraction(28, 3)
    assert cost.all_reduce_limit(1000, 10**9) == pytest.approx(2000)  # ZeRO, section 7.1: 2 Ψ


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_collectives_send_what_was_predicted(ranks):
    results = run(lambda: {size: traffic(size) for size in SIZES}, ranks=ranks)
    root = ranks - 1
    for rank, by_size in enumerate(results):
        for n, counted in by_size.items():
            predicted = {
                "broadcast": cost.broadcast(n, ranks, rank, src=root),
                "reduce": cost.reduce(n, ranks, rank, dst=root),
                "reduce_scatter": cost.reduce_scatter(n, ranks, rank),
                "all_gather": cost.all_gather(n, ranks, rank),
                "all_reduce": cost.all_reduce(n, ranks, rank),
                "all_reduce_doubling": cost.all_reduce_doubling(n, ranks, rank),
                "all_to_all": cost.all_to_all(n, ranks, rank),
                "barrier": cost.barrier(ranks),
            }
            assert counted == {name: dataclasses.astuple(sent) for name, sent in predicted.items()}


def test_time_by_hand():
    link = {"latency": 1e-5, "bandwidth": 1e9}
    assert cost.ring_seconds(10**6, 4, **link) == pytest.approx(6e-5 + 1.5e-3)
    assert cost.tree_seconds(10**6, 4, **link) == pytest.approx(4 * (1e-5 + 1e-3))
    assert cost.doubling_seconds(10**6, 4, **link) == pytest.approx(2 * (1e-5 + 1e-3))
    assert cost.doubling_seconds(10**6, 5, **link) == pytest.approx(4 * (1e-5 + 1e-3))
    assert cost.ring_seconds(10**6, 1, **link) == cost.doubling_seconds(10**6, 1, **link) == 0
    assert cost.doubling_seconds(1000, 64, **link) < cost.ring_seconds(1000, 64, **link)
    assert cost.doubling_seconds(10**9, 64, **link) > cost.ring_seconds(10**9, 64, **link)


# ---- memory ----------------------------------------------------------------------------------------------


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
    saved = {}  # by address, alive until they are counted

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


# ---- data parallelism ------------------------------------------------------------------------------------


def test_buckets_by_hand():
    sizes = [50, 40, 30, 20, 10]
    assert cost.buckets(sizes, "single") == []
    assert cost.buckets(sizes, "naive") == sizes
    assert cost.buckets(sizes, "bucketed", bucket_bytes=120) == [30, 30, 40, 50]
    assert cost.buckets(sizes, "overlapped", bucket_bytes=10**9) == [150]
    assert cost.buckets([2**19, 2**18, 2**17], "torch") == [2**18 + 2**17, 2**19]
    with pytest.raises(ValueError, match="variant is 'zero': it must be 'single', 'naive', 'bucketed'"):
        cost.buckets(sizes, "zero")


def test_sent_by_hand():
    # buckets of 3 and 4 elements on 3 ranks: rank 0 sends (6 - 1 - 1) + (8 - 2 - 1) = 9 elements, rank 2 8
    sizes = [4, 3]
    assert [cost.ddp_sent(sizes, 3, "bucketed", rank, bucket_bytes=1) for rank in range(3)] == [36, 40, 36]
    assert cost.ddp_sent(sizes, 3, "overlapped", 1) == 4 * 10  # one of 7: (14 - 2 - 2)
    assert cost.ddp_sent(sizes, 3, "naive", 0, find_unused=True) == 36 + 4 * (4 - 1 - 1)
    assert [cost.ddp_sent(sizes, 3, "single", rank, buffer_bytes=100) for rank in (0, 1)] == [200, 0]


WRAP = {
    "single": lambda model, **options: model,
    "naive": Naive,
    "bucketed": lambda model, **options: Bucketed(model, bucket_bytes=9_000, **options),
    "overlapped": lambda model, **options: Overlapped(model, bucket_bytes=9_000, **options),
    "torch": native.ddp,
}
BUCKET = {"bucketed": 9_000, "overlapped": 9_000}


def train(variant, config, batch=2, accumulation=1, steps=3, **options):
    """Steps with AdamW as the predictions have them."""
    model = GPT(config)
    module = WRAP[variant](model, **options)
    backward = partial(strategies.backward, module, no_sync=getattr(module, "no_sync", nullcontext))
    training = strategies.replicated(model, backward, finish=getattr(module, "sync", lambda: None))
    for _ in range(steps):
        mark("step")
        batches = torch.randint(config.vocab, (2, accumulation * batch, config.context))
        strategies.step(training, *batches, accumulation)
    mark("end")


@pytest.mark.parametrize("variant", WRAP)
def test_ranks_send_what_was_predicted(variant):
    def body():
        train(variant, config, steps=3)
        if variant != "single":
            train(variant, config, steps=3, find_unused=True)

    config = CONFIGS["one layer, one head of keys"]
    sizes, bucket_bytes = cost.parameter_sizes(config), BUCKET.get(variant, 25 * cost.MiB)
    recording = run(body, ranks=3, record="communication").recording
    for rank in range(3):
        prediction = cost.ddp(Job(config, 2, 3, rank), variant, bucket_bytes)
        assert recording.sent(rank, step=2) == prediction.sent
        assert recording.counts(rank, step=2)["all_reduce"] == prediction.all_reduces
        assert prediction.sent == pytest.approx(float(prediction.textbook), rel=0.01)
        if variant != "single":
            bitmap = cost.ddp_sent(sizes, 3, variant, rank, bucket_bytes, find_unused=True)
            assert recording.sent(rank, step=5) == bitmap
            assert recording.counts(rank, step=5)["all_reduce"] == prediction.all_reduces + 1


@pytest.mark.parametrize("variant", WRAP)
@pytest.mark.parametrize(
    "name, batch, accumulation",
    [
        ("tiny", 2, 2),
        ("one layer, one head of keys", 9, 1),
        ("tied, as many heads of keys", 3, 1),
        ("wide mlp", 1, 1),
        ("wide mlp", 1, 2),
    ],
)
def test_ranks_hold_what_was_predicted(variant, name, batch, accumulation):
    config = CONFIGS[name]
    ranks = 1 if variant == "single" else 2
    job = run(train, variant, config, batch, accumulation, steps=4, ranks=ranks, record="memory")
    bucket_bytes = BUCKET.get(variant, 25 * cost.MiB)
    prediction = cost.ddp(Job(config, batch, ranks, accumulation=accumulation), variant, bucket_bytes)
    assert job.recording.steady() == dataclasses.asdict(prediction.held)


def test_buffers_are_predicted():
    def body():
        torch.manual_seed(0)
        model = Naive(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        mark("step")
        model(torch.randn(2, 3, generator=torch.Generator().manual_seed(dist.get_rank()))).sum().backward()
        model.sync()
        mark("end")

    recording = run(body, ranks=2, record="communication").recording
    sizes, buffers = [12, 4, 4, 4], 4 * 4 + 4 * 4 + 8
    for rank in range(2):
        assert recording.sent(rank, step=0) == cost.ddp_sent(sizes, 2, "naive", rank, buffer_bytes=buffers)
