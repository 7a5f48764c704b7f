"""Tests of labs.pp with stages as somebody else would write them.

The reference is one process with the same micro-batches one after another, bit by bit.  A parameter with two uses
agrees within 1e-12, because one process adds them up in another order.
"""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as functional
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from labs import fsdp, native
from labs.kit.launch import run
from labs.memory.recompute import recompute
from labs.mesh import Mesh
from labs.model import GPT
from labs.pp import SCHEDULES, B, F, Pipeline, cut, read_csv
from labs.pp.checker import stages_of
from tests.pp.trainings import SMALL, batch, loss_of

WIDTH, M = 6, 4


class Plain(nn.Module):
    def __init__(self, number=0):
        super().__init__()
        self.number, self.a, self.b = number, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class WeightsOfOthers(Plain):
    """A stage with matrices that are not parameters, but made of them."""

    def forward(self, x):
        x = torch.tanh(functional.linear(x, 2 * self.a.weight, self.a.bias))
        return functional.linear(x, self.b.weight + self.a.weight, bias=self.b.bias)


class WeightNormed(Plain):
    def __init__(self, number=0):
        super().__init__(number)
        self.a = weight_norm(self.a)


class BatchNormed(Plain):
    def __init__(self, number=0):
        super().__init__(number)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return super().forward(self.norm(x))


class Drops(Plain):
    """A stage with dropout from a stream of its own, as a rank has one."""

    def forward(self, x):
        if not hasattr(self, "stream"):
            self.stream = torch.Generator().manual_seed(self.number)
        return super().forward(x * torch.empty_like(x).bernoulli_(generator=self.stream))


class Attends(Plain):
    def __init__(self, number=0):
        super().__init__(number)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return super().forward(self.attention(*[x[None]] * 3)[0][0])


class Checkpointed(Plain):
    def forward(self, x):
        return x + checkpoint(super().forward, x, use_reentrant=False)


class Autocast(Plain):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)  # bfloat16 crosses the cuts


class PartlyFrozen(Plain):
    def __init__(self, number=0):
        super().__init__(number)
        self.b.requires_grad_(False)
        self.a.requires_grad_(number % 2 == 0)


class Passes(Plain):
    """A stage that, as every other one, does nothing, and has parameters that nobody uses."""

    def forward(self, x):
        return x if self.number % 2 else super().forward(x)


class Transposes(Plain):
    def forward(self, x):
        return super().forward(x).t().contiguous().t()


class Chooses(Plain):
    """A stage whose path depends on its input."""

    def forward(self, x):
        return self.a(x) if x.sum() > 0 else self.b(x)


class BeginsInPlace(Plain):
    def forward(self, x):
        return super().forward(x.mul_(2) if self.number else x)


class Steers(Plain):
    """A stage that asks for a gradient in its forward, and uses it as a number."""

    create_graph = False

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        y = super().forward(x)
        (steered,) = torch.autograd.grad(y.square().sum(), x, create_graph=self.create_graph, retain_graph=True)
        return y + steered


class Forces(Steers):
    """A stage that trains by such a gradient."""

    create_graph = True


class TrainsInside(Plain):
    """A stage with a backward of its own, of another loss."""

    def forward(self, x):
        y = super().forward(x)
        y.square().mean().backward(retain_graph=True)
        return y


class ReentrantlyCheckpointed(Plain):
    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        return x + checkpoint(super().forward, x, use_reentrant=True)


def recomputed(number):
    stage = Plain(number)
    recompute([stage])
    return stage


KINDS = [Plain, WeightsOfOthers, WeightNormed, BatchNormed, Drops, Attends, Checkpointed, recomputed, Autocast]
KINDS += [
    PartlyFrozen,
    Passes,
    Transposes,
    Chooses,
    BeginsInPlace,
    Steers,
    Forces,
    TrainsInside,
    ReentrantlyCheckpointed,
]


def stages(kind, count, shared=False):
    torch.manual_seed(0)
    made = [kind(number).double() for number in range(count)]
    return [made[number % 2] for number in range(count)] if shared else made


def differences(kind, lists, freeze=lambda stages, step: None, **others):
    """Return the largest difference of gradients and buffers after two batches, and the parameters with only one
    gradient.
    """
    mine, theirs = (stages(kind, stages_of(lists), **others) for _ in range(2))
    torch.manual_seed(1)
    x, y = torch.randn(2 * M, WIDTH).double(), torch.randn(2 * M).double()
    pipeline, whole = Pipeline(mine, lists, loss_of), nn.Sequential(*theirs)
    for step in range(2):
        freeze(mine, step)
        freeze(theirs, step)
        pipeline.forward_backward(x, y)
        for micro_x, micro_y in zip(x.chunk(M), y.chunk(M), strict=True):
            (loss_of(whole(micro_x), micro_y) / M).backward()
    found, alone = [0.0], []
    for number, stage in pipeline.stages.items():
        for (name, p), q in zip(stage.named_parameters(), theirs[number].parameters(), strict=True):
            if p.grad is None or q.grad is None:
                alone += [name] if p.grad is not q.grad else []
            else:
                found.append((p.grad - q.grad).abs().max().item())
        found += [(a - b).abs().max() for a, b in zip(stage.buffers(), theirs[number].buffers(), strict=True)]
    return max(found), alone


def learners(ranks, microbatches):
    """Return somebody's own lists, as in a file: one rank splits its backwards, and does all its Ws at the end."""
    rows = ["0F0,0F1,,,0I0,0F2,0I1,0F3,0I2,,0I3,0W0,0W1,0W2,0W3", ",1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"]
    return tuple(map(tuple, read_csv(rows)))


def freezing(stages, step):
    """Freeze the first stages from the second batch on, and the bias of another one."""
    for stage in stages[: step * len(stages) // 2]:
        stage.requires_grad_(False)
    stages[-1].a.bias.requires_grad_(step == 0)


def unfreezing(stages, step):
    for stage in stages:
        stage.requires_grad_(step > 0 or stage is stages[-1])


def odd_ones():
    for name in ("1f1b", "zb1p", "zbv"):
        for freeze in (freezing, unfreezing):
            assert differences(Plain, SCHEDULES[name](2, M), freeze) == (0, []), (freeze.__name__, name)
    for kind in KINDS:
        for name in ("1f1b", "zb1p", "dualpipev", "a learner's"):
            schedule = SCHEDULES.get(name, learners)
            largest, alone = differences(kind, schedule(2, M))
            # A sum over a transposed tensor, or of several gradients, is rounded in another order.
            rounded = kind in (Transposes, Forces, TrainsInside)
            assert largest == 0 or (rounded and largest < 1e-12), (kind.__name__, name, largest)
            assert not alone, (kind.__name__, name, alone)
    for name, schedule in SCHEDULES.items():
        largest, alone = differences(Plain, schedule(2, M), shared=True)
        assert largest < 1e-12 and not alone, name


def test_odd_stages_have_one_processs_gradients():
    run(odd_ones, ranks=2)


def sharded(kind, name):
    """Run two pipelines side by side, with each stage sharded over the ranks that have it."""
    mesh, model, whole = Mesh((2, 2), ("dp", "pp")), GPT(SMALL).double(), GPT(SMALL).double()
    lists = SCHEDULES[name](2, 2)
    all_stages = cut(model, stages_of(lists))
    mine = [all_stages[number] for number in sorted({x.stage for x in lists[mesh.get_local_rank("pp")]})]
    for stage in mine:
        if kind == "ours":
            fsdp.fully_shard(stage, mesh=mesh["dp"])
        else:
            native.fsdp(stage, stage.layers.values(), native.device_mesh(mesh)["dp"])
    pipeline = Pipeline(all_stages, lists, model.loss, mesh.get_group("pp"))
    x, y = batch(0, 4)
    pipeline.forward_backward(x, y)
    for micro_x, micro_y in zip(x.chunk(2), y.chunk(2), strict=True):
        (whole(micro_x, micro_y) / 2).backward()
    for stage in mine:
        for name, p in stage.named_parameters():
            assert torch.equal(p.grad.full_tensor(), whole.get_parameter(name).grad), (kind, name)


def all_sharded():
    for kind in ("ours", "PyTorch's"):
        for name in ("1f1b", "zb1p", "zbv"):
            sharded(kind, name)


def test_fsdp_drops_its_parameters_and_no_gradient_is_lost():
    """Check with FSDP, which reduces a layer's gradients when its backward is over: a W would come too late."""
    run(all_sharded, ranks=4)


# ---- refusals --------------------------------------------------------------------------------------------


def of_two_batches():
    """Check that every rank raises the same words, and that the pipeline goes on with a proper batch."""
    rank, model = dist.get_rank(), GPT(SMALL)
    pipeline = Pipeline(cut(model, 2), SCHEDULES["1f1b"](2, M), model.loss)
    (x, y), (other_x, other_y) = batch(0, M), batch(1, M)

    def refuse(text, *given):
        with pytest.raises(ValueError, match=f"^{text}"):
            pipeline.forward_backward(*given[rank])

    one = r"torch.int64 of shape \(4, 5\), checksum [0-9a-f-]+"
    sentence = (
        f"is not the same everywhere: {one} on rank {{}}, which reads it, but {one} on rank {{}}; give all ranks one"
    )
    refuse("x " + sentence.format(0, 1), (x, y), (other_x, y))
    refuse("y " + sentence.format(1, 0), (x, y), (None, other_y))
    refuse("x is a batch of 8, and y one of 4: give the first", (batch(0, 2 * M)[0], None), (None, y))
    refuse("x is a batch of 6, which is not divisible by 4 micro-batches", (batch(0, 6)[0], None), (None, y))
    refuse("y is None on rank 1, which has the last stage and reads it", (x, y), (x, None))
    refuse(r"y has shape \(\): a batch has one or more in its first dim", (x, None), (None, torch.tensor(3)))
    refuse(r"x has shape \(0, 5\): a batch has one", (x[:0], y[:0]), (x[:0], y[:0]))
    pipeline.forward_backward(*((x, None), (None, y))[rank])
    text = "[xy] is a batch of 8, and in the first step it was one of 4: give batches of one size, or make another"
    refuse(text, *[batch(0, 2 * M)] * 2)
    text = f"{'xy'[rank]} is None on rank {rank}, which has the {('first', 'last')[rank]} stage and reads it"
    refuse(text, (None, y), (x, None))
    pipeline.forward_backward(other_x, other_y)


def test_batches_that_do_not_belong_together_are_refused():
    run(of_two_batches, ranks=2)


class CutOff(Plain):
    """A stage of three that lets no gradient back: to its matrices, or to its input."""

    def __init__(self, number, way):
        super().__init__(number)
        self.way = way

    def forward(self, x):
        match self.way:
            case "its input":
                return super().forward(x.detach())
            case "its output":
                return super().forward(x).detach()
            case "both":
                with torch.no_grad():
                    return super().forward(x)
        return super().forward(x)


def three(cuts, frozen=0):
    torch.manual_seed(0)
    made = [CutOff(number, cuts.get(number)).double() for number in range(3)]
    for stage in made[:frozen]:
        stage.requires_grad_(False)
    return made


ON_ONE = [[x for m in range(2) for x in (*(F(s, m) for s in range(3)), *(B(s, m) for s in (2, 1, 0)))]]


def cut_off(lists, cuts, frozen=0, loss=loss_of):
    """Check that gradients are those of one process, if nothing is refused."""
    mine, whole = three(cuts, frozen), three(cuts, frozen)
    torch.manual_seed(1)
    x, y = torch.randn(2, WIDTH).double(), torch.randn(2).double()
    Pipeline(mine, lists, loss).forward_backward(x, y)
    if frozen < 3:
        loss(nn.Sequential(*whole)(x), y).backward()
    for a, b in zip(mine, whole, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert p.grad is q.grad is None or (p.grad - q.grad).abs().max() < 1e-12


def no_gradient():
    no_graph = "requires no gradient, though parameters before it are to be trained: neither detach it"
    for cuts, text in [
        ({1: "its output"}, f"1F0 has made a tensor that {no_graph}"),
        ({1: "both"}, f"1F0 has made a tensor that {no_graph}"),
        ({0: "its output"}, f"0F0 has made a tensor that {no_graph}"),
        ({1: "its input"}, "1F0 has made a tensor that passes no gradient to its input, though stages before"),
        ({2: "its input"}, "2F0 has made a loss that passes no gradient to its input, though stages before"),
    ]:
        with pytest.raises(ValueError, match=f"^{text}"):
            cut_off(ON_ONE, cuts)
    with pytest.raises(ValueError, match=f"^2F0 has made a loss that {no_graph}") as failed:
        cut_off(ON_ONE, {}, loss=lambda y, target: loss_of(y, target).detach())
    assert failed.value.__notes__ == ["in 2F0, the forward of micro-batch 0 in stage 2"]
    for cuts, frozen in [({0: "its output"}, 1), ({1: "its input"}, 1), ({0: "both", 1: "both"}, 2), ({}, 2), ({}, 3)]:
        cut_off(ON_ONE, cuts, frozen)


def test_a_stage_that_lets_no_gradient_back_is_refused_unless_nothing_before_it_is_trained():
    """Check the refusal: the stage would train the stages before it on zeros."""
    run(no_gradient, ranks=1)


def refused():
    rank, lists, model = dist.get_rank(), SCHEDULES["1f1b"](2, M), GPT(SMALL)

    def refuse(text, stages, loss, **others):
        with pytest.raises(ValueError, match=f"^{re.escape(text)}"):
            Pipeline(stages, lists, loss, **others)

    text = (
        "stage 0 is not the same on ranks 0 and 1, where 'layers.3.attention_norm.weight' is missing or frozen on one"
    )
    refuse(text, cut(model, [[3, 5], [5, 3]][rank]), model.loss)
    model.head.requires_grad_(rank == 0)
    text = "stage 1 is not the same on ranks 0 and 1, where 'head.weight' is missing or frozen on one of them: cut the"
    refuse(text, cut(model, 2), model.loss)
    with torch.device("meta"):
        empty = [BatchNormed() for _ in range(2)]
    text = "buffer 'norm.running_mean' is on the meta device, and has no numbers to begin with: initialise it"
    refuse(text, empty, loss_of, initial=lambda name, shape: torch.ones(shape))
    tied = stages(Plain, 2)
    tied[1].b.weight = tied[0].a.weight
    pipeline = Pipeline(tied, lists, loss_of)
    tied[0].a.weight.requires_grad_(False)
    text = (
        f"'{'ab'[rank]}.weight' is tied to a parameter of another rank's stage, and was frozen after the Pipeline was"
    )
    with pytest.raises(RuntimeError, match=text):
        pipeline.forward_backward(torch.ones(M, WIDTH).double(), torch.ones(M).double())
    pipeline = Pipeline(stages(Plain, 2), lists, loss_of)
    for without in (torch.no_grad(), torch.inference_mode()):
        with without, pytest.raises(RuntimeError, match=r"under torch.no_grad\(\), where nothing has a gradient"):
            pipeline.forward_backward(torch.ones(M, WIDTH).double(), torch.ones(M).double())


def test_what_would_be_silently_wrong_is_refused():
    run(refused, ranks=2)
