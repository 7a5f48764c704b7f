"""Tests of labs.pp in jobs.

References, bit by bit: the same micro-batches one after another on one process, and PyTorch's own pipelining.
"""

import os
import random
import re
import signal
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from labs import native, pp
from labs.kit.launch import RankError, run
from labs.model import GPT, initial_value
from labs.pp import SCHEDULES, B, F, Pipeline, alive, cut
from labs.pp.checker import microbatches_of, stages_of
from tests.pp.common import random_lists
from tests.pp.trainings import (
    HAS_V,
    PYTORCHS,
    SMALL,
    V,
    batch,
    expected,
    largest_difference,
    loss_of,
    named,
    piped,
    train,
)

# ---- numbers ---------------------------------------------------------------------------------------------


def all_schedules(references, config, dtype, microbatches):
    for name, schedule in SCHEDULES.items():
        found = piped(config, dtype, schedule(dist.get_world_size(), microbatches))
        assert largest_difference(found, references[config, dtype, microbatches]) == 0, name


@pytest.mark.parametrize(
    ("ranks", "depth", "dtype", "microbatches"), [(2, 4, torch.float64, 6), (4, 8, torch.float32, 8)]
)
def test_one_process_has_the_same_bits(ranks, depth, dtype, microbatches):
    case = replace(SMALL, depth=depth), dtype, microbatches
    run(all_schedules, expected(case), *case, ranks=ranks)


def by_pytorch(config, microbatches, reference, schedules):
    for name, schedule in schedules.items():
        lists = schedule(dist.get_world_size(), microbatches)
        stages = cut(GPT(config), stages_of(lists))
        theirs = native.pp(stages, name, microbatches, GPT(config).loss)
        mine = [stages[s] for s in sorted({x.stage for x in lists[dist.get_rank()]})]
        parameters = {name: p for stage in mine for name, p in stage.named_parameters()}
        x, y = batch(0, microbatches)
        losses = []
        last = stages[-1] in mine
        theirs.step(*[x] * (stages[0] in mine), **({"target": y, "losses": losses} if last else {}))
        torch.optim.AdamW(parameters.values(), 1e-2).step()
        assert all(torch.equal(p.grad, reference[1][key]) for key, p in parameters.items()), name
        assert all(torch.equal(p, reference[2][key]) for key, p in parameters.items()), name
        assert all(map(torch.equal, losses, reference[0])) and bool(losses) == last


def test_pytorch_has_the_same_bits():
    """Check PyTorch against one process. Micro-batches are a power of two, since PyTorch divides at the very end."""
    case = SMALL, torch.float32, 8, 1
    run(by_pytorch, SMALL, 8, expected(case)[case], PYTORCHS, ranks=4)


@pytest.mark.skipif(HAS_V, reason="this PyTorch runs V-shaped schedules over gloo")
@pytest.mark.parametrize("name", V)
def test_a_v_that_pytorch_cannot_run_is_refused(name):
    with pytest.raises(RankError, match=f"before it runs {name}, and gloo has none from a rank to itself"):
        run(by_pytorch, SMALL, 8, None, {name: SCHEDULES[name]}, ranks=2)


def sharded_stages():
    """Check one of FSDP's stages on each rank. stay: whether it, and whether its layers, stay gathered after
    forward.
    """
    said = r"zb1p splits the backward, and FSDP reshards stage \d{} after forward: PyTorch's gradients would be wrong"
    for schedule, stay, where in [
        ("zb1p", (True, True), None),
        ("1f1b", (False, False), None),
        ("zb1p", (False, False), ""),
        ("zb1p", (True, False), r", layers\.\d,"),
    ]:
        stages, mesh = cut(GPT(SMALL), dist.get_world_size()), init_device_mesh("cpu", (dist.get_world_size(),))
        mine = stages[dist.get_rank()]
        for layer in mine.layers.values():
            fully_shard(layer, mesh=mesh)
        fully_shard(mine, mesh=mesh)
        if any(stay):
            mine.set_reshard_after_forward(False, recurse=all(stay))
        with nullcontext() if where is None else pytest.raises(ValueError, match=said.format(where)):
            native.pp(stages, schedule, 4, GPT(SMALL).loss)


def test_what_fsdp_reshards_is_refused_where_the_backward_is_split():
    run(sharded_stages, ranks=2)


def tied(references, config):
    differences, copies = [], []
    for schedule in SCHEDULES.values():
        found = piped(config, torch.float64, schedule(dist.get_world_size(), 4))
        differences.append(largest_difference(found, references[config, torch.float64, 4]))
        copies.append([numbers.get("embed.weight", numbers.get("head.weight")) for numbers in found[1:]])
    return differences, copies


def test_a_tied_embedding_has_the_whole_gradient_wherever_it_is():
    """Compare with one process, which adds up the two parts of the gradient per micro-batch; we do so once per step."""
    config = replace(SMALL, depth=4, tied=True)
    (first, ours), (last, theirs) = run(tied, expected((config, torch.float64, 4)), config, ranks=2)
    assert max(first + last) < 1e-12
    for name, mine, other in zip(SCHEDULES, ours, theirs, strict=True):
        if name not in V:  # the first rank of a V has both stages
            assert all(map(torch.equal, mine, other)), name


def clipped(config):
    """Take a step of 2 micro-batches and one of 4 with the same pipeline: norms and gradients beside one process's."""
    ranks = dist.get_world_size()
    model, whole = GPT(config).double(), GPT(config).double()
    pipeline, found = Pipeline(cut(model, ranks), pp.one_f_one_b(ranks, 2), model.loss), []
    for microbatches in (2, 4):
        pipeline.follow(pp.one_f_one_b(ranks, microbatches))
        x, y = batch(0, 4 * microbatches)
        pipeline.forward_backward(x, y)
        whole(x, y).backward()
        norm, reference = pipeline.clip_gradients(0.1), nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        found.append((norm - reference).abs().item())
        found += [(p.grad - whole.get_parameter(name).grad).abs().max().item() for name, p in named(pipeline).items()]
    with pytest.raises(ValueError, match=r"stages on ranks \[.*\], and here they are on \[.*\]: make a new Pipeline"):
        pipeline.follow(pp.interleaved(ranks, ranks))
    return max(found)


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_clipped_by_the_norm_of_one_process_after_steps_of_other_sizes(tied):
    assert max(run(clipped, replace(SMALL, depth=2, tied=tied), ranks=2)) < 1e-12


# ---- any lists -------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A stage with a matrix that is used twice, a layer whose input has no gradient, and a width of its own."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.twice, self.out = nn.Linear(inputs, inputs), nn.Linear(inputs, outputs, bias=False)
        self.norm = nn.LayerNorm(inputs)
        self.of_nothing = nn.Linear(1, inputs)

    def forward(self, x):
        x = x + self.twice(torch.tanh(self.twice(self.norm(x)))) + self.of_nothing(x.new_ones(1))
        return self.out(x)


WIDTHS = [3, 5, 4, 7, 6, 2, 8]


def odd_stages(count):
    torch.manual_seed(0)
    return [Odd(*WIDTHS[s : s + 2]).double() for s in range(count)]


def any_lists(all_lists):
    differences = []
    for number, lists in enumerate(all_lists):
        m = microbatches_of(lists)
        torch.manual_seed(number)
        x, y = torch.rand(2 * m, 3).double(), torch.rand(2 * m).double()
        pipeline, reference = Pipeline(odd_stages(stages_of(lists)), lists, loss_of), odd_stages(stages_of(lists))
        held = []
        compute = pipeline.compute
        pipeline.compute = lambda x, compute=compute, held=held, pipeline=pipeline: (
            compute(x),
            held.append(len(pipeline.alive) + len(pipeline.later)),
        )
        pipeline.forward_backward(x, y)
        assert held == alive(lists)[dist.get_rank()]
        loss_of(nn.Sequential(*reference)(x), y).backward()
        for s, stage in pipeline.stages.items():
            pairs = zip(stage.parameters(), reference[s].parameters(), strict=True)
            differences += [(a.grad - b.grad).abs().max().item() for a, b in pairs]
    return max(differences, default=0)


def test_any_lists_that_can_be_run_are():
    """Check the gradients of one process, and exactly as many activations alive as the lists have."""
    draw = random.Random(3)
    lists = [random_lists(draw, 3, draw.randint(1, 6), draw.randint(1, 5)) for _ in range(24)]
    assert max(run(any_lists, lists, ranks=3)) < 1e-12


def uneven(references):
    lists = pp.one_f_one_b(4, 4)
    for layers in ([3, 1, 2, 2], [1, 5, 1, 1]):
        found = piped(SMALL, torch.float32, lists, layers)
        assert largest_difference(found, references[SMALL, torch.float32, 4]) == 0
    frozen = GPT(SMALL)
    first, *others = cut(frozen, 4)
    pipeline = Pipeline([first.requires_grad_(False), *others], lists, frozen.loss)
    whole = GPT(SMALL)
    for stage in cut(whole, 4)[:1]:
        stage.requires_grad_(False)
    for _ in range(2):
        x, y = batch(0, 4)
        pipeline.forward_backward(x, y)
        for micro_x, micro_y in zip(x.chunk(4), y.chunk(4), strict=True):
            (whole(micro_x, micro_y) / 4).backward()
    for name, p in named(pipeline).items():
        assert p.grad is None if dist.get_rank() == 0 else torch.equal(p.grad, whole.get_parameter(name).grad)
    with torch.device("meta"):
        empty = GPT(replace(SMALL, tied=True))
    made = Pipeline(cut(empty, 4), lists, empty.loss, initial=lambda name, shape: initial_value(name, shape, 0))
    model = GPT(replace(SMALL, tied=True))
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in named(made).items())
    made.forward_backward(x, y)
    return list(named(made)), sum(not p.is_meta for p in empty.parameters()) == len(made.parameters())


def test_cuts_need_not_be_even_nor_all_of_it_be_trained_nor_the_model_ever_be_whole():
    case = SMALL, torch.float32, 4
    names, only_its_own = zip(*run(uneven, expected(case), ranks=4), strict=True)
    whole = GPT(replace(SMALL, tied=True)).state_dict()
    assert sorted(name for rank in names for name in rank) == sorted(whole)
    assert all(only_its_own)


def subgroup(references, config):
    """Run two pipelines side by side, each on the ranks of one group, as along an axis of a mesh."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = GPT(config)
    pipeline = Pipeline(cut(model, 2), pp.zb1p(2, 2), model.loss, groups[dist.get_rank() % 2])
    found = train(lambda number: pipeline.forward_backward(*batch(number, 2)), named(pipeline), 2)
    return largest_difference(found, references[config, torch.float32, 2]), len(found[0])


def test_a_pipeline_along_one_axis():
    config = replace(SMALL, depth=2)
    found = run(subgroup, expected((config, torch.float32, 2)), config, ranks=4)
    assert found == [(0, 0), (0, 0), (0, 4), (0, 4)]


# ---- refusals --------------------------------------------------------------------------------------------


class Two(nn.Module):
    def forward(self, x, skipped):
        return x + skipped


def refuse(text, stages, lists, kind=ValueError, **others):
    with pytest.raises(kind, match=re.escape(text)):
        Pipeline(stages, lists, loss_of, **others)


def bad_pipelines():
    model, lists = GPT(SMALL), pp.gpipe(2, 3)
    refuse("the schedule is for 3 ranks, and the group has 2", cut(model, 3), pp.gpipe(3, 3))
    refuse("the schedule is for 2 stages, and the model is cut into 3", cut(model, 3), lists)
    refuse("stage 1 takes x and skipped, but gets one tensor, from the stage before it", [nn.Tanh(), Two()], lists)
    refuse(
        "1F1 is missing", cut(model, 2), [[F(0, 0), B(0, 0), F(0, 1), B(0, 1)], [F(1, 0), B(1, 0)]], pp.WrongSchedule
    )
    other = lists if dist.get_rank() else pp.one_f_one_b(2, 3)
    refuse("ranks 0 and 1 were given different schedules: give all of them the same lists", cut(model, 2), other)
    seeds = cut(GPT(replace(SMALL, tied=True), seed=dist.get_rank()), 2)
    refuse("replicas differ from the start: parameter 'embed.weight' is", seeds, lists)
    with torch.device("meta"):
        empty = cut(GPT(SMALL), 2)
    name = "embed.weight" if dist.get_rank() == 0 else "layers.4.attention_norm.weight"
    refuse(f"parameter {name!r} is on the meta device: say with initial= what it starts from", empty, lists)
    pipeline = Pipeline(cut(model, 2), lists, model.loss)
    x, y = batch(0, 4)
    for mine in ((x, y), (x if dist.get_rank() == 0 else None, y if dist.get_rank() == 1 else None)):
        with pytest.raises(ValueError, match="is a batch of 4, which is not divisible by 3 micro-batches"):
            pipeline.forward_backward(*mine)
    with pytest.raises(ValueError, match="x is None on rank 0, which has the first stage and reads it"):
        pipeline.forward_backward(None, None)
    pipeline.forward_backward(*batch(0, 6))


def test_what_does_not_fit_together_is_refused_in_a_sentence():
    run(bad_pipelines, ranks=2)
    model = GPT(SMALL)
    for stages, text in [
        (9, "9 stages of 8 layers: a stage has 1 or more, so give 1 to 8"),
        (0, "0 stages of 8 layers: a stage has 1 or more, so give 1 to 8"),
        ([4, 5], "stages of [4, 5] layers: give each 1 or more, and 8 in all"),
        ([8, 0], "stages of [8, 0] layers: give each 1 or more, and 8 in all"),
        ([], "stages of [] layers: give each 1 or more, and 8 in all"),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            cut(model, stages)
    with pytest.raises(ValueError, match="31 tokens are more than the context of 30"):
        cut(model, 2)[0](torch.zeros(1, 31, dtype=torch.int64))


class Fails(nn.Module):
    """A module that works `well` times, then does something else."""

    def __init__(self, well, otherwise):
        super().__init__()
        self.linear, self.left, self.otherwise = nn.Linear(3, 3), well, otherwise

    def forward(self, x):
        self.left -= 1
        x = self.linear(x)
        return x if self.left >= 0 else self.otherwise(x)


def raises(x):
    raise KeyError("a mistake")


def dies(x):
    os.kill(os.getpid(), signal.SIGKILL)


def fails(well, otherwise):
    stages = [nn.Linear(3, 3), Fails(well, otherwise), nn.Linear(3, 3)]
    pipeline = Pipeline(stages, pp.one_f_one_b(3, 4), loss_of)
    pipeline.forward_backward(torch.ones(8, 3), torch.ones(8))


@pytest.mark.parametrize(
    ("well", "otherwise", "text"),
    [
        (2, raises, "rank 1 of 3 failed: KeyError: 'a mistake'\nin 1F2, the forward of micro-batch 2 in stage 1"),
        (
            0,
            lambda x: (x, x),
            "TypeError: 1F0 has made a tuple of 2: one tensor crosses a cut, so stack or concatenate",
        ),
        (1, lambda x: x.long(), "TypeError: 1F1 has made torch.int64 with 2 dims: what crosses a cut has a gradient"),
        (
            3,
            lambda x: x.double(),
            "ValueError: 1F3 has made torch.float64 of shape (2, 3), and earlier messages over this cut were "
            "torch.float32 of shape (2, 3): micro-batches must be alike",
        ),
        (2, lambda x: x[:1], "1F2 has made torch.float32 of shape (1, 3), and earlier messages over this cut were"),
        (2, dies, "rank 1 died of SIGKILL"),
    ],
)
def test_a_stage_that_fails_is_reported_with_its_micro_batch(well, otherwise, text):
    with pytest.raises(RankError, match=re.escape(text)):
        run(fails, well, otherwise, ranks=3)


class Broken:
    def wait(self):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:4242")


def waits_for_one_that_is_gone():
    pipeline = Pipeline([nn.Linear(3, 3)], pp.gpipe(1, 1), loss_of)
    pipeline.mail.arriving[F(0, 3)] = 1, Broken(), torch.zeros(2, 3)
    with pytest.raises(RuntimeError, match=r"^rank 1 is gone, and this rank waits for its 0F3: Connection closed") as e:
        pipeline.compute(F(1, 3))
    assert e.value.__notes__ == ["in 1F3, the forward of micro-batch 3 in stage 1"]
    with pytest.raises(RuntimeError, match="must match the size of tensor b"):
        pipeline.forward_backward(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(RuntimeError, match="the last forward_backward failed, and messages of it may be in flight"):
        pipeline.forward_backward(torch.ones(2, 3), torch.ones(2))


def test_a_rank_that_waits_for_a_dead_rank_names_what_it_waits_for():
    run(waits_for_one_that_is_gone, ranks=1)
