"""Tests of labs.tp.parallel_layers: blocks, masks and borders, against the same model on one process."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from labs.kit.launch import run
from labs.tp import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    gpt_plan,
    parallelize,
)
from labs.tp.parallel_layers import Region, Watched
from labs.tp.parameter_cuts import Queries
from tests.tp.common import SMALL, batch, largest_difference, refuse, split, tp_mesh

# ---- random numbers --------------------------------------------------------------------------------------


class Masks(nn.Module):
    def __init__(self):
        super().__init__()
        self.on_whole, self.on_shards = nn.Dropout(0.5), nn.Dropout(0.5)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return torch.stack([self.on_whole(x), self.on_shards(x), self.on_whole(x)])


def masks():
    torch.manual_seed(3)
    model = parallelize(Masks(), tp_mesh(), {"on_shards": SequenceParallel()})
    first, second = (model(torch.ones(64)) for _ in range(2))
    again = model.eval()(torch.ones(64))
    return first, second, again


def test_masks_are_the_same_where_x_is_whole_and_different_where_it_is_in_shards():
    (first, second, again), (other, _, _) = run(masks, ranks=2)
    assert torch.equal(first[0], other[0]) and torch.equal(first[2], other[2])
    assert not torch.equal(first[1], other[1])
    assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(again, torch.ones_like(again))


# ---- refusals --------------------------------------------------------------------------------------------


def different_batches():
    model = split(gpt_plan(SMALL))
    model(*batch(23, seed=dist.get_rank()))


def different_masks():
    split({}, Masks())(torch.ones(3))


class Normed(nn.Module):
    """A model whose heads are normalised by a norm that the plan forgets."""

    def __init__(self):
        super().__init__()
        self.q, self.norm, self.o = nn.Linear(8, 8), nn.LayerNorm(2), nn.Linear(8, 8)

    def forward(self, x):
        return self.o(self.norm(self.q(x).unflatten(-1, (-1, 2))).flatten(-2)).square().mean()


def forgotten_norm(**plan):
    torch.manual_seed(0)
    model = split(
        {"q": ColwiseParallel(heads=Queries(4, 4)), "o": RowwiseParallel(), **(plan or {})}, Normed().double()
    )
    torch.manual_seed(0)
    reference, x = Normed().double(), torch.rand(3, 8).double()
    for each in (model, reference):
        each(x).backward()
    return largest_difference(model, reference)


NOT_ALIKE = {
    different_batches: "input 0 differs on ranks 0 and 1: under tensor parallelism all ranks of a group read the same",
    different_masks: "the state of random numbers differs on ranks 0 and 1",
    forgotten_norm: "is not split, and its gradient differs on ranks 0 and 1: it was used inside a split layer, or on",
}


def test_values_that_must_be_alike_and_differ_are_refused():
    def body():
        for job, text in NOT_ALIKE.items():
            refuse(job, text, RuntimeError)

    run(body, ranks=2)


def test_a_norm_of_heads_has_its_gradients_added_up():
    assert max(run(forgotten_norm, norm=SequenceParallel(), ranks=2)) < 1e-12


class Residual(nn.Module):
    """A block that adds to x, is prepared as a whole, and splits a second time."""

    def __init__(self):
        super().__init__()
        self.before = nn.Linear(8, 8)
        self.block = TwoPairs()

    def forward(self, x):
        return self.block(x=self.before(x)).square().mean()


class TwoPairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(8), nn.Parameter(torch.tensor(0.7))
        self.up, self.down, self.again, self.back = nn.Linear(8, 6), nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 8)

    def forward(self, x):
        x = x + self.scale * self.down(torch.tanh(self.up(x)))
        return x + self.back(torch.tanh(self.again(self.norm(x))))


def larger_block():
    torch.manual_seed(0)
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {"block": PrepareModuleInput(), "block.up": columns, "block.down": rows, "block.again": columns}
    model = split({**plan, "block.back": rows}, Residual())
    torch.manual_seed(0)
    reference, x = Residual(), torch.rand(3, 8)
    for each in (model, reference):
        each(x).backward()
    return largest_difference(model, reference)


def test_a_residual_and_a_second_pair_inside_of_a_prepared_block_are_right():
    assert max(run(larger_block, ranks=2)) < 1e-6


class Gated(nn.Module):
    """A block with two columns of one x and, with `inner`, a block within it."""

    def __init__(self, inner=None):
        super().__init__()
        self.gate, self.up, self.down, self.inner = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8), inner

    def forward(self, x):
        y = x if self.inner is None else self.inner(x)
        return y + self.down(torch.tanh(self.gate(x)) * self.up(x))


def block_in_a_block():
    pair = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    blocks = {"0": PrepareModuleInput(), "0.inner": PrepareModuleInput()}
    torch.manual_seed(0)
    reference = nn.Sequential(Gated(Gated()))
    inside = {f"{block}.{name}": style for block in blocks for name, style in pair.items()}
    model = split(blocks | inside, copy.deepcopy(reference))
    model.tensor_parallel.compared_as_whole = True  # skips a comparison that takes all-reduces of its own
    for each in (model, reference):
        each(torch.ones(3, 8, requires_grad=True)).square().sum().backward()
    return largest_difference(model, reference)


def borders(model):
    found = [value for module in model.modules() for value in vars(module).values()]
    found += [value for region in found if isinstance(region, Region) for value in vars(region).values()]
    return [isinstance(value, Watched) for value in found]


def test_borders_are_watched_in_the_first_step_alone():
    def body():
        model, watched = split(gpt_plan(SMALL, True)), []
        for _ in range(2):
            watched.append(any(borders(model)))
            model(*batch(SMALL.vocab)).backward()
        return watched

    assert run(body, ranks=2) == [[True, False]] * 2


def test_columns_enter_through_the_block_that_is_closest():
    results = run(block_in_a_block, ranks=2, record="communication")
    assert max(results) < 1e-5
    assert sum(e.op == "all_reduce" and e.rank == 0 for e in results.recording.events) == 4  # one per block and way
