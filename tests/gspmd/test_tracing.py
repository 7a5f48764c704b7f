"""Tests of labs.gspmd.tracing: a graph is right in every layout, on numbers that were not traced, or is refused."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from labs.dtensor import Shard
from labs.gspmd import execute, lower, propagate, trace
from labs.kit.launch import run
from labs.mesh import Mesh

OUTSIDE = torch.zeros(8, 8)


def inner(x, y, do):
    """Return x + 1 and y after `do`, which writes to its input."""
    z = x + 1
    do(z)
    return z, y


def used_before(x, y):
    constant = torch.ones(8, 8)
    z = x * constant
    constant.add_(1)
    return (z * constant,)


def gradient(x, y):
    leaf = x.detach().requires_grad_()
    return (torch.autograd.grad((leaf @ y).relu_().square().sum(), leaf)[0],)


def running_sum(x, y):
    sums = torch.zeros_like(x)
    for i in range(1, 8):
        sums[:, i : i + 1] = sums[:, i - 1 : i] + x[:, i : i + 1]
    return (sums,)


def half(x, y):
    z = torch.zeros_like(x)
    z[:, :2] = x[:, 2:4] * 2
    return (z,)


def base_later(x, y):
    z = x * 2
    view = z.t()
    z.add_(1)
    return (view * 3,)


def flat_later(x, y):
    z = x * 2
    flat = z.view(-1)
    z.add_(1)
    return (flat * 1,)


RIGHT = {
    "a product with itself": lambda x, y: (x @ x.t(), x.t() @ x, x @ x),
    "twice": lambda x, y: (x * x, x + x, torch.cat([x, x]), x.t() * x),
    "both": lambda x, y: (x @ y.t(), x - y, x.div(y)),
    "in place": lambda x, y: ((x * 2).add_(y).mul_(x), (x - y).relu_()),
    "gradient": gradient,
    "constants": lambda x, y: (x * torch.tensor([2.0]).add_(1), y + torch.zeros(()).fill_(3).item(), x @ torch.eye(8)),
    "shapes": lambda x, y: (x * len(y), x.reshape(4, 2, 8).transpose(0, 1) + y.shape[0]),
    "a list": lambda x, y: (x * torch.tensor(torch.arange(8.0).tolist()),),
    "results": lambda x, y: (x, y, x.t()),
}
WRITES = {
    "half": half,
    "running sum": running_sum,
    "base later": base_later,
    "flat later": flat_later,
    "fill_ of a view": lambda x, y: inner(x, y, lambda z: z[2:].fill_(0)),
    "add_ of t": lambda x, y: inner(x, y, lambda z: z.t().add_(1)),
    "diagonal": lambda x, y: inner(x, y, lambda z: z.view(-1)[::9].zero_()),
    "an argument": lambda x, y: (x.mul_(2),),
    "an argument later": lambda x, y: inner(x, y, lambda z: y.add_(z)),
    "a view of an argument": lambda x, y: (x.t().mul_(2),),
    "detached": lambda x, y: (x.detach().zero_() + x,),
    "a constant": lambda x, y: (torch.zeros(8, 8).add_(x) * 2,),
    "used before": used_before,
    "from outside": lambda x, y: (x + OUTSIDE.add_(1),),
    "an argument to outside": lambda x, y: (OUTSIDE.copy_(x) + y,),
    "a view of outside": lambda x, y: (x + OUTSIDE[0].add_(1),),
    "data": lambda x, y: (x.data.add_(1) + x,),
}
NUMBERS = {
    "float": lambda x, y: (x * float(x.sum()),),
    "item": lambda x, y: (x * (x * 2).sum().item(),),
    "branch": lambda x, y: (x * 2 if x.sum() > 0 else x * 3,),
    "while": lambda x, y: (x if bool((y.sum() > 3).logical_and(x.sum() > 0)) else y,),
    "equal": lambda x, y: (x if torch.equal(x, y) else y,),
    "tolist": lambda x, y: (y * x.tolist()[0][0],),
    "numpy": lambda x, y: (y * float(x.detach().numpy()[0, 0]),),
    "array": lambda x, y: (y * torch.from_numpy(np.asarray(x) + 1),),
    "max of Python": lambda x, y: (y * max(x.sum(), y.sum()),),
    "int": lambda x, y: (y[: int(x.sum())],),
}
RANDOM = {
    "rand": lambda x, y: (x + torch.rand(8, 8),),
    "normal_": lambda x, y: (x + torch.empty(8, 8).normal_(),),
    "mask": lambda x, y: (x * torch.bernoulli(torch.full((8, 8), 0.5)),),
}
GIVEN = [{}, {0: [Shard(0)]}, {0: [Shard(1)]}, {0: [Shard(0)], 1: [Shard(1)]}, {0: [Shard(1)], 1: [Shard(0)]}]


def numbers(seed):
    return list(torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(seed)))


def differences():
    mesh, found = Mesh((2,), ("x",)), {}
    for name, fn in RIGHT.items():
        graph = trace(fn, *numbers(0))
        expected = fn(*numbers(1))
        for layout in GIVEN:
            program = lower(graph, propagate(graph, (2,), {graph.arguments[i]: p for i, p in layout.items()}))

            def own(x, value, program=program):
                return x[program.layouts[value].block(mesh.get_coordinate()).slices].contiguous()

            results = execute(program, mesh, *map(own, numbers(1), graph.arguments))
            found[name, str(layout)] = [
                (a - own(b, value)).abs().max().item()
                for a, b, value in zip(results, expected, graph.results, strict=True)
            ]
    return found


def test_what_is_traced_is_right_in_every_layout():
    for rank in run(differences, ranks=2, device="cpu"):
        for case, found in rank.items():
            assert max(found) < 1e-5, case


@pytest.mark.parametrize(
    ("forms", "sentence"),
    [
        (WRITES, "writes to a tensor of shape .* a graph has values, no memory: make a new tensor"),
        (NUMBERS, "Python can neither read them nor decide by them: compute with tensors, as torch.where does"),
        (RANDOM, "these random numbers would never change: pass them in"),
    ],
)
def test_what_a_graph_cannot_say_is_refused(forms, sentence):
    for name, fn in forms.items():
        x, y = numbers(0)
        with pytest.raises(NotImplementedError, match=sentence):
            trace(fn, x, y)
        assert all(map(torch.equal, (x, y), numbers(0))), f"{name}: the caller's tensors are as they were"


def test_arguments_that_are_one_tensor_are_two():
    x = torch.ones(4, 4)
    graph = trace(lambda a, b: (a - b, b[:, :2]), x, x)
    program = lower(graph, propagate(graph, (1,), {}))
    assert len(set(graph.arguments)) == 2
    results = run(lambda: execute(program, Mesh((1,), ("x",)), 3 * x, x), ranks=1, device="cpu")[0]
    assert torch.equal(results[0], 2 * x) and torch.equal(results[1], x[:, :2])


def test_a_tensor_that_is_given_by_name_is_refused():
    def masked(x, mask):
        return (F.scaled_dot_product_attention(x, x, x, attn_mask=mask),)

    x = torch.ones(2, 2, 4, 4)
    with pytest.raises(NotImplementedError, match="attn_mask: a tensor given as a keyword argument gets no layout"):
        trace(masked, x, torch.zeros(4, 4))
    assert trace(lambda x: masked(x, torch.zeros(4, 4)), x).operations


def test_a_conjugate_is_no_value_of_its_own_memory():
    with pytest.raises(NotImplementedError, match="_conj has no rule"):
        trace(lambda x: (x.conj() * 2,), torch.ones(2, dtype=torch.complex64))
