"""Reference: the same model on one process, and PyTorch's parallelize_module by the same plan."""

import copy
import re
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import parallel, placement_types
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from labs import native
from labs.ddp import Overlapped
from labs.dtensor import Partial, Replicate, Shard
from labs.fsdp import fully_shard
from labs.kit.launch import RankError, run
from labs.kit.record import mark
from labs.memory.recompute import recompute
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.tp import (
    ColwiseParallel,
    LossParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    clip_gradients,
    full_parameters,
    gpt_plan,
    parallelize,
    placements,
)
from labs.tp.parallel_layers import Region, Watched
from labs.tp.shares import Keys, Queries
from labs.zero import Zero
from tests.models import Brought

SMALL = Config(vocab=23, dim=24, depth=2, heads=6, kv_heads=3, hidden=41, context=16)
SHAPES = {
    "odd vocabulary and hidden width": SMALL,
    "tied": replace(SMALL, tied=True),
    "one layer, as many kv_heads as heads": replace(SMALL, depth=1, kv_heads=6),
}
FEWER = replace(SMALL, heads=4, kv_heads=2, vocab=5)  # 4 ranks: kv_heads on two each, a rank without a word


def tp_mesh():
    return Mesh((dist.get_world_size(),), ("tp",))


def batch(vocabulary, tokens=8, seed=0):
    x, y = torch.randint(0, vocabulary, (2, 2, tokens), generator=torch.Generator().manual_seed(seed))
    y[0, 1] = -100
    return x, y


def largest_difference(model, reference):
    """Of every gradient, this rank's part."""
    cuts, rank = model.tensor_parallel.cuts, dist.get_rank()
    whole = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    parts = {name: cuts[name].part(g, rank) if name in cuts else g for name, g in whole.items()}
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert own.keys() == parts.keys() and all(own[name].shape == parts[name].shape for name in own)
    return max((own[name] - parts[name]).abs().max().item() for name in own if own[name].numel())


# ---- numbers -----------------------------------------------------------------------------------------------------


def against_one_process(shapes):
    """By shape, dtype and plan: the largest difference of losses and gradients, over two micro-batches."""
    off = {}
    for name, config in shapes.items():
        for dtype in (torch.float64, torch.float32):
            for sequence in (False, True):
                reference = GPT(config).to(dtype)
                model = parallelize(GPT(config).to(dtype), tp_mesh(), gpt_plan(config, sequence))
                differences = []
                for seed in range(2):
                    x, y = batch(config.vocab, 12, seed)
                    losses = [each(x, y) for each in (model, reference)]
                    for loss in losses:
                        loss.backward()
                    differences.append(abs(losses[0].item() - losses[1].item()))
                off[name, dtype, sequence] = max(*differences, largest_difference(model, reference))
                whole = full_parameters(model)
                assert all(torch.equal(whole[name], p) for name, p in reference.named_parameters())
                if not sequence:
                    assert torch.allclose(model(x), reference(x), atol=1e-5)
    return off


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_one_process_has_the_same_loss_and_gradients(ranks):
    for off in run(against_one_process, SHAPES if ranks < 4 else {"fewer kv_heads than ranks": FEWER}, ranks=ranks):
        for (name, dtype, sequence), difference in off.items():
            assert difference < (1e-12 if dtype == torch.float64 else 1e-5), (name, dtype, sequence)


def brought_plan(sequence):
    x = Shard(1) if sequence else Replicate()
    plan = {
        "wte": RowwiseParallel(output_layouts=x),
        "wpe": RowwiseParallel(output_layouts=x),
        "h.*.attn": PrepareModuleInput(input_layouts=x),
        "h.*.attn.w[qkv]": ColwiseParallel(heads=Queries(4, 4)),
        "h.*.attn.wo": RowwiseParallel(output_layouts=x, heads=Queries(4, 4)),
        "h.*.mlp.fc_in": ColwiseParallel(input_layouts=x),
        "h.*.mlp.fc_out": RowwiseParallel(output_layouts=x),
        "lm_head": ColwiseParallel(input_layouts=x, output_layouts=Replicate()),
    }
    norms = ("h.*.ln_1", "h.*.ln_2", "ln_f") if sequence else ()
    return plan | {norm: SequenceParallel() for norm in norms}


def brought():
    off = []
    for sequence in (False, True):
        torch.manual_seed(0)
        reference = Brought().double()
        torch.manual_seed(0)
        model = parallelize(Brought().double(), tp_mesh(), brought_plan(sequence))
        x, _ = batch(24)
        outputs = [each(x) for each in (model, reference)]
        for output in outputs:
            output.square().mean().backward()
        off += [(outputs[0] - outputs[1]).abs().max().item(), largest_difference(model, reference)]
    return max(off)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_model_under_other_names_with_biases(ranks):
    assert max(run(brought, ranks=ranks)) < 1e-12


# ---- models of all kinds -----------------------------------------------------------------------------------------


class Sequence(nn.Module):
    """tokens -> embedding -> block -> head; in shards of the sequence between them."""

    def __init__(self, block):
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(7, 6), block(), nn.Linear(6, 7)

    def forward(self, tokens):
        x = self.block(self.embed(tokens))
        x += 1
        return self.head(x)

    @staticmethod
    def plan(**block):
        rows = RowwiseParallel(output_layouts=Shard(1))
        inside = {f"block.{name}": rows if style == "rows" else style for name, style in block.items()}
        head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
        return {"embed": rows, "block": PrepareModuleInput(input_layouts=Shard(1)), **inside, "head": head}


class LowRank(nn.Module):
    """x through a narrow place, which is whole: inside a block whose x was gathered."""

    def __init__(self):
        super().__init__()
        self.narrow, self.wide, self.out = nn.Linear(6, 3), nn.Linear(3, 6), nn.Linear(6, 6)

    def forward(self, x):
        return self.out(torch.tanh(self.wide(torch.tanh(self.narrow(x)))))


class Norm(nn.Module):
    """Begins with a norm, and is called by keywords in another order than it names them."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 6)

    def forward(self, x, mask=None):
        return self.down(torch.tanh(self.up(self.norm(x))) * (1 if mask is None else mask))


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Norm()

    def forward(self, x):
        # As many positions as the shards have together, which is what the mask is for.
        return self.inner(mask=torch.linspace(0, 1, 6, dtype=x.dtype)[:, None], x=x)


class Repeated(nn.Module):
    """A block under two names, used three times; a frozen layer with a low-rank addition, all of it in place."""

    def __init__(self):
        super().__init__()
        block = Norm()
        self.blocks, self.addition = nn.ModuleList([block, block]), nn.ModuleList([nn.Linear(6, 2), nn.Linear(2, 6)])
        self.more = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x):
        for block in (*self.blocks, self.blocks[0]):
            x = x + block(x)
        y = self.more(x)
        y += self.addition[1](self.addition[0](x))
        return y.mul_(2)


def odd_models():
    columns, rows, join = ColwiseParallel(), RowwiseParallel(), ColwiseParallel(output_layouts=Replicate())
    tokens, x = torch.arange(12).view(2, 6) % 7, torch.linspace(-1, 1, 72, dtype=torch.float64).view(2, 6, 6)
    prepared = Sequence.plan(**{"inner.up": columns, "inner.down": "rows"})
    prepared["block.inner"] = prepared.pop("block")
    repeated = {"blocks.*.up": columns, "blocks.*.down": rows, "more": join, "addition.1": join}
    return [
        (lambda: Sequence(LowRank), Sequence.plan(narrow=join, wide=columns, out="rows"), tokens),
        (lambda: Sequence(LowRank), Sequence.plan(wide=columns, out="rows"), tokens),
        (lambda: Sequence(LowRank), {**Sequence.plan(narrow=columns, wide=rows, out=join), "head": join}, tokens),
        (lambda: Sequence(Norm), Sequence.plan(up=columns, down="rows"), tokens),
        (lambda: Sequence(ByKeyword), prepared, tokens),
        (Repeated, repeated, x),
        (Repeated, {**repeated, "more": RowwiseParallel(input_layouts=Replicate())}, x[:0]),
        (lambda: Sequence(Norm), Sequence.plan(up=columns, down="rows"), tokens[:0]),
    ]


def both(make, plan):
    """Split, and whole."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    return parallelize(models[0], tp_mesh(), plan), models[1]


def every_odd_model():
    off = []
    for make, plan, given in odd_models():
        models, outputs, gradients = both(lambda make=make: make().double(), plan), [], []
        for model in models:
            x = given.clone().requires_grad_(given.is_floating_point())
            outputs.append(model(x))
            (outputs[-1] * torch.linspace(-1, 1, outputs[-1].numel()).view_as(outputs[-1])).sum().backward()
            gradients.append(x.grad if x.requires_grad else x)
        off += [(a - b).abs().max().item() for a, b in (outputs, gradients) if a.numel()]
        off.append(largest_difference(*models))
    return max(off)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_odd_models(ranks):
    assert max(run(every_odd_model, ranks=ranks)) < 1e-12


def around_it():
    """Gradients and an optimizer from before; autocast; compilation, of a model that has not taken its first step."""
    model, reference = GPT(SMALL).double(), GPT(SMALL).double()
    optimizers = [torch.optim.AdamW(each.parameters(), 0.1, eps=1e-3) for each in (model, reference)]
    x, y = batch(23, 12)
    for step in range(2):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            each(x, y).backward()
            if step:
                optimizer.step()
        if not step:
            parallelize(model, tp_mesh(), gpt_plan(SMALL, True))
    assert largest_difference(model, reference) < 1e-12 and abs(model(x, y) - reference(x, y)) < 1e-12

    pair = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), pair)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 6)).dtype == reference(torch.ones(2, 6)).dtype == torch.bfloat16
    model, reference = both(lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)), pair)
    compiled = torch.compile(model, backend="eager")
    for each in (compiled, reference):
        each(torch.ones(2, 6)).square().sum().backward()
    assert largest_difference(model, reference) < 1e-6


def test_what_was_there_before_and_what_goes_around():
    run(around_it, ranks=2)


# ---- trainings of all kinds --------------------------------------------------------------------------------------


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 7), nn.Linear(7, 6), nn.LayerNorm(6)

    def pair(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x):
        return (self.norm(self.pair(x)) - x).square().mean()


class Reentrant(Pair):
    def pair(self, x):
        return checkpoint(super().pair, x, use_reentrant=True)


class Twice(Pair):
    def pair(self, x):
        return super().pair(super().pair(x)) + x


@dataclass
class Output:
    loss: torch.Tensor
    others: dict


class Nested(Pair):
    """One of its parameters is not used."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        y = self.norm(self.pair(x))
        return Output(y.square().mean(), {"y": [y]})


PAIR = {"up": ColwiseParallel(), "down": RowwiseParallel()}
JOINED = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
NORMED = {**PAIR, "norm": SequenceParallel(), "down": RowwiseParallel(output_layouts=Shard(0))}


ADAMW = partial(torch.optim.AdamW, eps=1e-3)


def given():
    return torch.linspace(-1, 1, 24, dtype=torch.float64).sin().view(4, 6).requires_grad_()


def plainly(model, optimizer, step):
    model(given()).backward()


def in_two(model, optimizer, step):
    for x in given().chunk(2):
        (model(x) / 2).backward()


def unfreezing(model, optimizer, step):
    model.requires_grad_(False)
    for layer in (model.norm, model.down, model.up)[: step + 1]:
        layer.requires_grad_()
    model.up.bias.requires_grad_(step == 0)
    model(given()).backward()


def penalised(model, optimizer, step):
    loss = model(x := given())
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def all_recomputed(model, optimizer, step):
    checkpoint(model, given(), use_reentrant=True).backward()


def of_several_outputs(model, optimizer, step):
    output = model(given())
    (output.loss + output.others["y"][0].pow(3).sum()).backward()


def inferred_before(model, optimizer, step):
    with torch.inference_mode():
        model(given())
    plainly(model, optimizer, step)


def through_a_copy(model, optimizer, step):
    """An average of the model takes nothing from it, and gives its loss."""
    average = deepcopy(model)
    for p, q in zip(average.parameters(), model.parameters(), strict=True):
        p.data.lerp_(q.data, 0.5)
    loss = model(given())
    assert torch.equal(average(given()), loss)
    loss.backward()


def trained(way, make=Pair, plan=PAIR, optimizer=ADAMW, clip=None, steps=3):
    """The largest difference of parameters and gradients."""
    models = both(lambda: make().double(), plan)
    for model in models:
        stepping = optimizer(model.parameters(), 0.1)
        for step in range(steps):
            stepping.zero_grad()
            way(model, stepping, step)
            if clip:
                clip(model.parameters(), 0.01)
            stepping.step()
    cuts, rank = models[0].tensor_parallel.cuts, dist.get_rank()
    parts = {name: cuts[name].part(p, rank) if name in cuts else p for name, p in models[1].named_parameters()}
    off = [(p - parts[name]).abs().max().item() for name, p in models[0].named_parameters()]
    return max(*off, largest_difference(*models))


def all_trainings():
    for way in (plainly, in_two, unfreezing, penalised, all_recomputed, inferred_before, through_a_copy):
        assert trained(way) < 1e-11, way.__name__
    for make in (Reentrant, Twice):
        assert trained(plainly, make) < 1e-11, make.__name__
    for plan in (JOINED, {**PAIR, "up": ColwiseParallel(output_layouts=Replicate()), "down": JOINED["down"]}):
        assert trained(penalised, plan=plan) < 1e-11
    assert trained(of_several_outputs, Nested) < 1e-11


def test_whatever_training_one_process_can_do():
    run(all_trainings, ranks=2)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (nn.Linear(*sizes, dtype=torch.complex128) for sizes in ((6, 7), (7, 6)))

    def forward(self, x):
        return self.down(self.up(x)).abs().square().mean()


def other_types_and_inputs():
    """Complex numbers; hooks from before; a first input that is this rank's shard."""
    model, reference = both(Complex, PAIR)
    for each in (model, reference):
        each(given().detach().to(torch.complex128)).backward()
    assert largest_difference(model, reference) < 1e-12

    torch.manual_seed(0)
    model, seen = Pair().double(), []
    model.up.weight.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    model.norm.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    parallelize(model, tp_mesh(), PAIR)(given()).backward()
    assert seen[0] is model.norm.weight.grad and torch.equal(2 * seen[1], model.up.weight.grad)

    block = {"up": ColwiseParallel(input_layouts=Shard(0)), "down": NORMED["down"], "norm": SequenceParallel()}
    model, reference = both(lambda: Shards().double(), block)
    x = given()
    reference(x).square().sum().backward()
    rank = dist.get_rank()
    mine = x.detach().chunk(2)[rank].requires_grad_()
    model(mine).square().sum().backward()
    assert largest_difference(model, reference) < 1e-12 and (mine.grad - x.grad.chunk(2)[rank]).abs().max() < 1e-12


class Shards(Pair):
    def forward(self, x):
        return self.norm(self.pair(x))


def test_complex_numbers_hooks_from_before_and_an_input_in_shards():
    run(other_types_and_inputs, ranks=2)


def of_matrices(kind, parameters, rate):
    return kind([p for p in parameters if p.ndim == 2], rate)


def bad_trainings():
    for name in ("Adafactor", "Muon", "LBFGS"):
        if kind := getattr(torch.optim, name, None):
            text = f"{name} looks at a whole matrix or at norms, and this rank has only its part of 'up.weight': under"
            refuse(lambda kind=kind: trained(plainly, optimizer=partial(of_matrices, kind)), text, TypeError)
    text = "is not split, and its gradient differs on ranks 0 and 1 as the optimizer begins, though not as backward"
    refuse(lambda: trained(plainly, clip=nn.utils.clip_grad_norm_), text, RuntimeError)
    assert trained(plainly, clip=nn.utils.clip_grad_value_) < 1e-11

    model = Pair().double()
    optimizer = torch.optim.AdamW(model.parameters())
    plainly(model, optimizer, 0)
    optimizer.step()
    loss = model(given())
    text = "parameter 'up.weight' is part of a graph that is still there, of an earlier loss or a wrapper such as DDP"
    refuse(lambda: split(PAIR, model), text)
    del loss
    plainly(split(PAIR, model), optimizer, 0)
    refuse(optimizer.step, "the optimizer has state of 'up.weight' from before parallelize(), for all of it")

    for name, plan in (("up", PAIR), ("down", PAIR)):
        model = split(plan, Pair())
        getattr(model, name).weight = Pair().get_parameter(f"{name}.weight")
        refuse(lambda model=model: model(torch.ones(4, 6)), f"the weight of {name!r} was replaced by one of shape (")
    model = split(gpt_plan(SMALL))
    model.embed.weight = GPT(SMALL).embed.weight
    refuse(lambda: model(*batch(23)), "the weight of 'embed' was replaced by one of shape (23, 24), and this rank's pa")
    model = split(gpt_plan(SMALL))
    text = "the loss of a split vocabulary (LossParallel) has no second derivative, for which create_graph=True asks"
    loss = model(*batch(23))
    refuse(lambda: torch.autograd.grad(loss, model.norm.weight, create_graph=True), text, RuntimeError)


def test_a_training_that_would_be_wrong_is_told_in_a_sentence():
    run(bad_trainings, ranks=2)


# ---- on a grid ---------------------------------------------------------------------------------------------------


def on_a_grid():
    """tp 2, and fsdp over the other two ranks: losses and gradients of half of the batch each, averaged."""
    mesh, off = Mesh((2, 2), ("dp", "tp")), []
    for sequence in (False, True):
        reference, model = (GPT(SMALL).double() for _ in range(2))
        parallelize(model, mesh["tp"], gpt_plan(SMALL, sequence))
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        x, y = batch(23, 12)
        y = y.abs() % 23
        model(*(each.chunk(2)[mesh.get_local_rank("dp")] for each in (x, y))).backward()
        reference(x, y).backward()
        cuts = model.tensor_parallel.cuts
        for name, p in reference.named_parameters():
            own = model.get_parameter(name).grad.full_tensor()
            part = cuts[name].part(p.grad, mesh.get_local_rank("tp")) if name in cuts else p.grad
            off.append((own - part).abs().max().item())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.step()
        with torch.no_grad():
            for p in reference.parameters():
                p -= 0.1 * p.grad
        whole = full_parameters(model)
        off += [(whole[name] - p).abs().max().item() for name, p in reference.named_parameters()]
    return max(off)


def test_fsdp_goes_on_top():
    assert max(run(on_a_grid, ranks=4)) < 1e-12


def others_on_a_grid():
    """After two steps the loss is one process's, which has read the same two batches."""
    mesh, off = Mesh((2, 2), ("dp", "tp")), []
    x, y = batch(23, 12)
    y = y.abs() % 23
    mine = [each.chunk(2)[mesh.get_local_rank("dp")] for each in (x, y)]
    for way in (zero_3, overlapped, sharded):
        config = replace(SMALL, hidden=1, vocab=1) if way is sharded else SMALL  # on some ranks nothing is left
        model, reference = GPT(config).double(), GPT(config).double()
        step = way(parallelize(model, mesh["tp"], gpt_plan(config, True)), mesh["dp"])
        plain = torch.optim.SGD(reference.parameters(), 0.1)
        for _ in range(3):
            losses = model(*(each % config.vocab for each in mine)), reference(x % config.vocab, y % config.vocab)
            total = losses[0].detach().clone()
            dist.all_reduce(total, group=mesh.get_group("dp"))
            off.append(abs(total.item() / 2 - losses[1].item()))
            plain.zero_grad()
            for loss in losses:
                loss.backward()
            step()
            plain.step()
    return max(off)


def zero_3(model, mesh):
    return Zero(model, 3, lambda shards: torch.optim.SGD(shards, 0.1), group=mesh.get_group()).step


def overlapped(model, mesh):
    copies, optimizer = Overlapped(model, group=mesh.get_group()), torch.optim.SGD(model.parameters(), 0.1)

    def step():
        copies.sync()
        optimizer.step()
        optimizer.zero_grad()

    return step


def sharded(model, mesh):
    optimizer = torch.optim.SGD(fully_shard(model, mesh=mesh).parameters(), 0.1)

    def step():
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_other_ways_of_data_parallelism_go_on_top():
    assert max(run(others_on_a_grid, ranks=4)) < 1e-12


def clipped():
    """The norm, and all gradients after it, with heads that two ranks share, and on a grid."""
    off, (x, y) = [], batch(23, 12)
    y = y.abs() % 23
    for mesh, config in ((tp_mesh(), replace(FEWER, vocab=23)), (Mesh((2, 2), ("dp", "tp")), SMALL)):
        model, reference = GPT(config).double(), GPT(config).double()
        parallelize(model, mesh["tp"], gpt_plan(config, True))
        groups, mine = (), (x, y)
        if mesh.ndim == 2:
            fully_shard(model, mesh=mesh["dp"])
            groups, mine = (mesh.get_group("dp"),), [each.chunk(2)[mesh.get_local_rank("dp")] for each in (x, y)]
        model(*mine).backward()
        reference(x, y).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        off.append(abs(clip_gradients(model, 0.01, groups) - expected).item())
        cuts, rank = model.tensor_parallel.cuts, mesh.get_local_rank("tp")
        for name, p in reference.named_parameters():
            own = model.get_parameter(name).grad
            own = own.full_tensor() if mesh.ndim == 2 else own
            off.append((own - (cuts[name].part(p.grad, rank) if name in cuts else p.grad)).abs().max().item())
    return max(off)


def test_gradients_are_clipped_by_the_norm_of_one_process():
    assert max(run(clipped, ranks=4)) < 1e-12


# ---- random numbers ----------------------------------------------------------------------------------------------


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


# ---- bytes -------------------------------------------------------------------------------------------------------


def steps(config, sequence, side):
    mesh, plan, model = tp_mesh(), gpt_plan(config, sequence), GPT(config)
    if side == "ours":
        parallelize(model, mesh, plan)
    else:
        native.tp(model, native.device_mesh(mesh), plan)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = batch(config.vocab)
    for _ in range(2):
        mark("step")
        with loss_parallel():
            model(x, y.abs() % config.vocab).backward()
        optimizer.step()
        optimizer.zero_grad()
    mark("end")


EVEN = replace(SMALL, vocab=24, heads=4, kv_heads=4, hidden=40)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sequence", [False, True])
def test_as_many_collectives_and_bytes_as_pytorch_issues(sequence, ranks):
    """All but two: torch sends the loss's two sums one by one.  Its reduce-scatter is our all-to-all (labs.group)."""
    seen = {
        side: run(steps, EVEN, sequence, side, ranks=ranks, record="communication").recording
        for side in ("ours", "torch")
    }
    for rank in range(ranks):
        ours, theirs = (
            Counter(
                (event.op.replace("all_to_all", "reduce_scatter"), event.sent) for event in seen[side].select(rank, 1)
            )
            for side in ("ours", "torch")
        )
        more, fewer = theirs - ours, ours - theirs
        assert (more.total(), fewer.total()) == (2, 1)
        assert sum(n * sent for (_, sent), n in more.items()) == sum(n * sent for (_, sent), n in fewer.items())


# ---- what is refused ---------------------------------------------------------------------------------------------


def refuse(make, text, kind=ValueError):
    with pytest.raises(kind, match=re.escape(text)):
        make()


def split(plan, model=None, mesh=None):
    return parallelize(GPT(SMALL) if model is None else model, mesh or tp_mesh(), plan)


def bad_plans():
    plan = gpt_plan(SMALL)
    refuse(
        lambda: split({"layers.*.atention.q": ColwiseParallel()}),
        "the plan has 'layers.*.atention.q', and no submodule is called that: did you mean 'layers.*.attention.q'?",
    )
    refuse(
        lambda: split({"norm": ColwiseParallel()}),
        "ColwiseParallel fits Linear, and 'norm' is of type RMSNorm",
    )
    refuse(lambda: split({"layers.0": SequenceParallel()}), "has modules in it: give SequenceParallel() to each")
    refuse(lambda: split({"head": LossParallel(23)}), "LossParallel fits CrossEntropy, and 'head' is of type Linear")
    refuse(
        lambda: split({"head": ColwiseParallel()}, GPT(replace(SMALL, tied=True))),
        "'embed.weight' and 'head.weight' are one parameter (tied), and the plan splits them differently",
    )
    model = GPT(SMALL)
    before = [p.shape for p in model.parameters()]
    refuse(lambda: split({**plan, "layers.*.attention.q": ColwiseParallel(heads=Queries(7, 7))}, model), "7 heads")
    assert before == [p.shape for p in model.parameters()], "nothing was changed"
    blocks = {name: style for name, style in gpt_plan(SMALL, True).items() if not isinstance(style, PrepareModuleInput)}
    refuse(
        lambda: split(blocks | {"layers.*": PrepareModuleInput(input_layouts=Shard(1))}),
        "'layers.0' gathers its sequence once, but leaves its split part at 'layers.0.attention.o' and 'layers.0.mlp.d",
    )
    refuse(lambda: split(plan, mesh=Mesh((1, 2), ("dp", "tp"))), "has 2 axes: tensor parallelism takes one")
    refuse(lambda: split(plan, GPT(SMALL, seed=dist.get_rank())), "replicas differ from the start")
    refuse(lambda: split({**plan, "norm": ColwiseParallel(input_layouts=Shard(0))}), "ColwiseParallel fits Linear")
    refuse(lambda: split({"q": ColwiseParallel()}, nn.Linear(2, 2)), "no submodule is called that: a Linear has none")
    refuse(lambda: split({"": SequenceParallel()}), "the plan has '', and no submodule is called that")
    refuse(lambda: split(ColwiseParallel()), "is no plan: give a table of styles by the names of submodules", TypeError)
    refuse(lambda: split({"head": ColwiseParallel}), "which is no style of labs.tp", TypeError)
    refuse(lambda: split({"head": parallel.ColwiseParallel()}), "which is no style of labs.tp", TypeError)
    refuse(lambda: split({}, mesh=2), "2 is no Mesh: give Mesh((4,), ", TypeError)


def bad_layouts():
    for end, layout, gives in (
        ("input_layouts", Partial(), "Replicate() or Shard(dim), of labs.dtensor"),
        ("output_layouts", Shard(1), "Replicate() or Shard(-1), of labs.dtensor"),
        ("input_layouts", placement_types.Shard(1), "Replicate() or Shard(dim), of labs.dtensor"),
    ):
        text = f"'head' has ColwiseParallel({end}={layout!r}): give {gives}"
        refuse(lambda end=end, layout=layout: split({"head": ColwiseParallel(**{end: layout})}), text)
    refuse(lambda: split({"head": RowwiseParallel(input_layouts=Shard(1))}), "Replicate() or Shard(-1), of labs")
    refuse(lambda: split({"layers.*": PrepareModuleInput(input_layouts=Partial())}), "Replicate() or Shard(dim), of l")
    bias = split({"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1))}, nn.Sequential(whole(4)))
    refuse(lambda: bias(torch.ones(3, 4)), "'0' has a bias of 4 features, and its output is cut to 2 of them")


def whole(size):
    torch.manual_seed(0)
    return nn.Linear(size, size)


def bad_models():
    for option in ({"padding_idx": 0}, {"padding_idx": 3}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}):
        model, text = nn.Sequential(nn.Embedding(4, 2, **option)), f"'0' is an Embedding with {next(iter(option))}"
        refuse(lambda model=model: split({"0": RowwiseParallel()}, model), text)
    model = split({"norm": SequenceParallel()})
    refuse(lambda: split({"head": ColwiseParallel()}, model), "'norm' has been split by an earlier parallelize()")
    recomputed = GPT(SMALL)
    recompute([recomputed.layers["0"].attention])
    refuse(lambda: split(gpt_plan(SMALL, True), recomputed), "'layers.0.attention' has been given another forward")
    tied = nn.Sequential(whole(4), whole(4), whole(4))
    tied[2].weight = tied[1].weight
    plan = {"0": ColwiseParallel(), "1": ColwiseParallel(), "2": RowwiseParallel()}
    refuse(lambda: split(plan, tied), "'1.weight' and '2.weight' are one parameter (tied)")
    refuse(lambda: split({"0": ColwiseParallel()}, nn.Sequential(nn.LazyLinear(2))), "parameter '0.weight' is lazy")
    pruned = nn.Sequential(prune.identity(whole(4), "weight"))
    refuse(lambda: split({"0": ColwiseParallel()}, pruned), "0.weight is computed from other parameters")
    sharded = fully_shard(GPT(SMALL), mesh=tp_mesh())
    refuse(lambda: split({}, sharded), "parameter 'embed.weight' is a DTensor already: parallelize() first")
    block = split({"0": PrepareModuleInput()}, nn.Sequential(nn.Embedding(4, 4)))
    refuse(lambda: block(torch.ones(3).long()), "'0' is prepared for a first input x that is split, and", TypeError)


def bad_calls():
    sequence = split(gpt_plan(SMALL, True))
    x, y = batch(23, 7)
    refuse(lambda: sequence(x, y), "7 positions (dim 1 of (2, 7, 24)) are not divisible by 2 ranks: use 6 or 8")
    model = split(gpt_plan(SMALL))
    refuse(lambda: model(x + 23), "token", IndexError)
    refuse(lambda: model(x, y.abs() + 30), "is not in the vocabulary, 0 to 22", IndexError)
    pieces = split({"layers.*.mlp.gate": ColwiseParallel(), "layers.*.mlp.up": ColwiseParallel()})
    refuse(lambda: pieces(x, y), "'layers.0.mlp.down' (Linear) is not split, takes all 41 features, and got 2")
    rows = split({"layers.*.mlp.down": RowwiseParallel()})
    refuse(lambda: rows(x, y), "takes this rank's part of its 41 features")
    fits = "do not fit logits of shape (2, 7, "
    refuse(lambda: model(x, y[:, 1:]), f"targets of torch.int64 (2, 6) {fits}")
    refuse(lambda: model(x, y.double()), f"targets of torch.float64 (2, 7) {fits}")


def test_what_does_not_fit_is_told_in_a_sentence():
    run(lambda: [job() for job in (bad_plans, bad_layouts, bad_models, bad_calls)], ranks=2)


def groups_after_a_split():
    config = replace(SMALL, heads=4, kv_heads=2)
    mesh = tp_mesh()
    split(gpt_plan(config), GPT(config), mesh)
    return ("tp", "by 2") in mesh.groups


def test_groups_of_neighbours_are_made_where_all_ranks_are():
    """A first forward may be that of some ranks alone: they would wait for the others in making a group."""
    assert all(run(groups_after_a_split, ranks=4))


@pytest.mark.parametrize(
    ("heads", "ranks", "nearest"),
    [((8, 2), 3, "2 or 4"), ((6, 3), 4, "3 or 6"), ((6, 3), 7, "6"), ((5, 5), 8, "5")],
)
def test_heads_that_cannot_be_dealt_out(heads, ranks, nearest):
    for style in (Queries(*heads), Keys(*heads)):
        with pytest.raises(
            ValueError, match=rf"{heads[0]} query heads over {heads[1]} .* {ranks} ranks: use {nearest}$"
        ):
            style.cut(heads[0] * 4, 0, ranks)


def different_batches():
    model = split(gpt_plan(SMALL))
    model(*batch(23, seed=dist.get_rank()))


def different_masks():
    split({}, Masks())(torch.ones(3))


class Normed(nn.Module):
    """Heads are normalised, by a norm that the plan forgets."""

    def __init__(self):
        super().__init__()
        self.q, self.norm, self.o = nn.Linear(8, 8), nn.LayerNorm(2), nn.Linear(8, 8)

    def forward(self, x):
        return self.o(self.norm(self.q(x).unflatten(-1, (-1, 2))).flatten(-2)).square().mean()


def forgotten_norm(plan):
    torch.manual_seed(0)
    model = split({"q": ColwiseParallel(heads=Queries(4, 4)), "o": RowwiseParallel(), **plan}, Normed())
    torch.manual_seed(0)
    reference, x = Normed(), torch.rand(3, 8)
    for each in (model, reference):
        each(x).backward()
    return largest_difference(model, reference)


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            different_batches,
            "input 0 differs on ranks 0 and 1: under tensor parallelism all ranks of a group read the same",
        ),
        (different_masks, "the state of random numbers differs on ranks 0 and 1"),
        (lambda: forgotten_norm({}), "parameter 'norm.weight' is not split, and its gradient differs on ranks 0 and 1"),
    ],
)
def test_what_must_be_alike_and_is_not(job, text):
    with pytest.raises(RankError, match=re.escape(text)):
        run(job, ranks=2)


def test_a_norm_of_heads_has_its_gradients_added_up():
    assert max(run(forgotten_norm, {"norm": SequenceParallel()}, ranks=2)) < 1e-6


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
    """Two columns of one x; with `inner`, a block within it."""

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


# ---- tables ------------------------------------------------------------------------------------------------------


def test_a_plan_prints_and_parameters_say_how_they_lie():
    assert "layers.*.attention.o      RowwiseParallel(heads=Queries(heads=6, kv_heads=3))" in repr(gpt_plan(SMALL))

    def where():
        return placements(split(gpt_plan(SMALL)))

    lie = run(where, ranks=2)[0]
    assert lie["layers.1.mlp.up.weight"] == lie["embed.weight"] == Shard(0)
    assert lie["layers.1.mlp.down.weight"] == Shard(1) and lie["norm.weight"] == Replicate()
