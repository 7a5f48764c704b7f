"""Tests of labs.dtensor against one process and against torch.distributed.tensor: numbers, and messages.

A case is a function of some tensors, and their placements.  Each runs three times: on whole tensors, with labs.dtensor
and with torch's, forward and backward, in float64.  Values and gradients agree within 1e-12.  The recorder counts the
collectives and their bytes for each of the two, and they are the same, or the row says why not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod

import pytest
import torch
import torch.distributed.tensor as torchs
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from labs import dtensor as ours
from labs.dtensor.placement import Spec
from labs.dtensor.redistribute import plan
from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh
from tests.dtensor.common import NAMES, TOKENS, placements, to, turned, weights


@dataclass(frozen=True)
class Case:
    """A case: what(*tensors) on a mesh. lie: each tensor's placements; "0R" is cut along dim 0, then whole."""

    what: Callable
    mesh: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    lie: tuple[str, ...]

    def __str__(self):
        name = getattr(self.what, "__name__", None) or self.what.func.__name__ + str(self.what.keywords)
        return f"{name} {self.shapes} as {self.lie} on {self.mesh}"


def relu(x):
    return x.relu()


def scale(x):
    return 3 * x


def matmul(a, b):
    return a @ b


def linear(x, w, b):
    return F.linear(x, w, b)


def add(a, b):
    return a + b


def mul(a, b):
    return a * b


def div(a, b):
    return a / (b * b + 1)


def total(x):
    return x.sum()


def sum_of(x, dim, keepdim=False):
    return x.sum(dim, keepdim)


def mean(x):
    return x.mean()


def mean_of(x, dim):
    return x.mean(dim)


def transpose(x):
    return x.transpose(0, 1) * 2


def square_mean(x):
    return (x**2).mean()


def softmax(x, dim):
    return x.softmax(dim)


def gelu_mlp(x, up, down):
    return F.linear(F.gelu(F.linear(x, up)), down)


def embedding(w):
    return F.embedding(None, w)


def tied(x, w):
    return (x @ w) @ w.t()


def merge(x):
    return x.view(-1, x.shape[-1]) * 2


def plus_number(x):
    return x + 1.5


def batch_matmul(a, b):
    return torch.bmm(a, b)


def cat(a, b, dim):
    return torch.cat((a, b), dim)


def first_times_last(x, dim):
    first, *_, last = x.chunk(2, dim)
    return first * last


def weighed(x, sizes, dim):
    return torch.cat([i * part for i, part in enumerate(x.split(sizes, dim), 1)], dim)


def middle(x, dim):
    return x.narrow(dim, 1, 2) * 2


def layer_norm(x, *params):
    return F.layer_norm(x, x.shape[-1:], *params)


def rms_norm(x, *params):
    return F.rms_norm(x, x.shape[-1:], *params, eps=1e-5)


def norm_mlp(x, weight, up):
    return F.gelu(F.linear(F.layer_norm(x, x.shape[-1:], weight), up))


MOVES = [
    Case(to(target), (n,), (shape,), (source,))
    for n in (2, 3, 4)
    for shape in ((4, 12), (5, 3), (1, 2))
    for source in "01RP"
    for target in "01R"
    if n == 2 or shape != (4, 12) or (source + target) in ("0R", "01", "PR", "P0")
]
MOVES_2D = [
    Case(to(target), (2, 2), ((8, 6) if i % 2 else (5, 3),), (source,))
    for i, (source, target) in enumerate(
        (source, target)
        for source in ("00", "01", "10", "0R", "R1", "P0", "0P", "PP", "PR", "RR", "11")
        for target in ("00", "01", "10", "R0", "RR", "1R")
        if source != target
    )
]
OPS = [
    *(
        Case(matmul, (n,), ((8, 12), (12, 4)), lie)
        for n in (2, 4)
        for lie in (("0", "R"), ("R", "1"), ("1", "0"), ("R", "R"))
    ),
    *(
        Case(matmul, (3,), ((5, 7), (7, 2)), lie)
        for lie in (("0", "R"), ("R", "1"), ("1", "0"), ("P", "R"), ("0", "0"))
    ),
    *(Case(linear, (2,), ((6, 4), (8, 4), (8,)), lie) for lie in (("0", "R", "R"), ("R", "0", "0"), ("1", "1", "R"))),
    *(
        Case(linear, (2, 2), ((2, 6, 4), (8, 4), (8,)), lie)
        for lie in (("0R", "R0", "R0"), ("0R", "RR", "RR"), ("0R", "00", "00"))
    ),
    *(
        Case(add, (2,), ((4, 6), (4, 6)), lie)
        for lie in (("0", "0"), ("0", "R"), ("P", "P"), ("P", "R"), ("0", "1"), ("P", "0"))
    ),
    *(Case(add, (3,), ((4, 5), (5,)), lie) for lie in (("0", "R"), ("1", "0"), ("R", "0"))),
    *(Case(mul, (2,), ((4, 6), (4, 6)), lie) for lie in (("0", "0"), ("P", "R"), ("P", "P"), ("1", "R"))),
    *(Case(mul, (2,), ((4, 6), (4, 1)), lie) for lie in (("0", "0"), ("1", "R"))),
    *(Case(div, (2,), ((4, 6), (4, 6)), lie) for lie in (("0", "0"), ("P", "R"))),
    *(Case(relu, (4,), ((6, 3),), (lie,)) for lie in "01RP"),
    *(Case(scale, (3,), ((4, 2),), (lie,)) for lie in "0P"),
    *(Case(plus_number, (3,), ((4, 2),), (lie,)) for lie in "0P"),
    *(Case(what, (3,), ((6, 3),), (lie,)) for what in (total, mean, square_mean) for lie in "0R"),
    *(Case(what, (2,), ((5, 4),), (lie,)) for what in (total, mean) for lie in "0P"),
    *(Case(partial(sum_of, dim=d), (2,), ((4, 6),), (lie,)) for d in (0, 1) for lie in "01P"),
    *(Case(partial(mean_of, dim=d), (2,), ((4, 6),), (lie,)) for d in (0, 1) for lie in "01"),
    *(Case(transpose, (2,), ((4, 6),), (lie,)) for lie in "01P"),
    *(Case(partial(softmax, dim=1), (2,), ((4, 6),), (lie,)) for lie in "01P"),
    *(
        Case(gelu_mlp, (2,), ((6, 4), (8, 4), (4, 8)), lie)
        for lie in (("R", "0", "1"), ("0", "R", "R"), ("0", "0", "0"))
    ),
    *(Case(gelu_mlp, (2, 2), ((4, 6, 4), (8, 4), (4, 8)), lie) for lie in (("0R", "R0", "R1"), ("0R", "00", "00"))),
    *(Case(tied, (2,), ((4, 6), (6, 8)), lie) for lie in (("0", "R"), ("R", "1"))),
    *(Case(merge, (2,), ((4, 3, 2),), (lie,)) for lie in "02RP"),
    *(Case(batch_matmul, (2,), ((4, 3, 2), (4, 2, 3)), lie) for lie in (("0", "0"), ("R", "2"), ("2", "1"))),
    *(Case(embedding, (2,), ((6, 4),), (lie,)) for lie in "01R"),
    *(
        Case(partial(cat, dim=d), (2,), ((4, 6), (4, 6)), lie)
        for d in (0, 1)
        for lie in (("0", "0"), ("1", "1"), ("R", "R"), ("P", "P"), ("0", "R"), ("P", "0"))
    ),
    *(Case(partial(cat, dim=0), (3,), ((5, 4), (1, 4)), lie) for lie in (("1", "1"), ("R", "1"))),
    *(Case(partial(cat, dim=1), (2, 2), ((4, 6), (4, 2)), lie) for lie in (("0R", "0R"), ("R0", "R0"))),
    *(Case(partial(first_times_last, dim=d), (2,), ((4, 6),), (lie,)) for d in (0, 1) for lie in "01RP"),
    *(Case(partial(weighed, sizes=s, dim=1), (3,), ((2, 7),), (lie,)) for s in ([1, 6], 3) for lie in "0RP"),
    *(Case(partial(middle, dim=d), (2,), ((5, 4),), (lie,)) for d in (0, 1) for lie in "01RP"),
    *(Case(turned, n, ((4, 3, 2, 6),), (lie,)) for n, lie in (((2,), "0"), ((3,), "1"), ((4,), "0"), ((2, 2), "01"))),
    *(
        Case(norm, (n,), ((5, 4), (4,)), lie)
        for norm in (layer_norm, rms_norm)
        for n in (2, 3)
        for lie in (("0", "R"), ("R", "R"))
    ),
    *(Case(layer_norm, (2,), ((5, 4), (4,), (4,)), lie) for lie in (("0", "R", "R"), ("1", "R", "R"))),
    Case(layer_norm, (4,), ((2, 3, 4), (4,), (4,)), ("0", "R", "R")),
    *(Case(layer_norm, (2,), ((5, 4),), (lie,)) for lie in "0P"),
    *(Case(rms_norm, (2,), ((4, 6),), (lie,)) for lie in "0P"),
    Case(rms_norm, (2,), ((5, 4), (4,)), ("0", "0")),
    *(Case(norm_mlp, (2,), ((6, 4), (4,), (8, 4)), lie) for lie in (("0", "R", "R"), ("R", "R", "0"))),
    Case(norm_mlp, (2, 2), ((4, 6, 4), (4,), (8, 4)), ("0R", "RR", "R0")),
]


if torch.__version__ >= "2.13":  # torch 2.11 raises an error in the backward of a norm whose weight is cut
    OPS += [
        Case(layer_norm, (2,), ((5, 4), (4,), (4,)), ("0", "0", "0")),
        Case(layer_norm, (4,), ((2, 3, 4), (4,), (4,)), ("R", "0", "0")),
        Case(norm_mlp, (2,), ((6, 4), (4,), (8, 4)), ("0", "0", "0")),
    ]


CASES = [*MOVES, *MOVES_2D, *OPS]
FEWER = [*MOVES, *MOVES_2D[::3], *OPS]


def tensors(case):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in case.shapes]


def apply(case, xs, lib=None, mesh=None):
    if case.what is embedding:
        tokens = (
            TOKENS
            if lib is None
            else lib.distribute_tensor(TOKENS, mesh, placements(lib, "R" * mesh.ndim), src_data_rank=None)
        )
        return F.embedding(tokens, xs[0])
    y = case.what(*xs)
    if lib is not None and hasattr(case.what, "to"):
        y = y.redistribute(placements=placements(lib, case.what.to))
    return y


def reference(case):
    xs = [x.requires_grad_() for x in tensors(case)]
    y = apply(case, xs)
    (y * weights(y)).sum().backward()
    return [y.detach(), *(x.grad for x in xs)]


def with_(lib, mesh, case):
    xs = [
        lib.distribute_tensor(x, mesh, placements(lib, lie), src_data_rank=None).requires_grad_()
        for x, lie in zip(tensors(case), case.lie, strict=True)
    ]
    mark("step")
    whole = apply(case, xs, lib, mesh).full_tensor()
    (whole * weights(whole)).sum().backward()
    mark("end")
    return [whole.detach(), *(x.grad.full_tensor() for x in xs)]


def both(cases):
    """Yield each case with ours and with torch's, against one process."""
    meshes = {}
    for case in cases:
        names = NAMES[: len(case.mesh)]
        if case.mesh not in meshes:
            meshes[case.mesh] = Mesh(case.mesh, names), init_device_mesh("cpu", case.mesh, mesh_dim_names=names)
        one = reference(case)
        for lib, mesh in zip((ours, torchs), meshes[case.mesh], strict=True):
            for x, y in zip(with_(lib, mesh, case), one, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=lambda text, at=case: f"{at}: {text}")


def collectives(recording, rank, step):
    events = recording.select(rank, step)
    return len(events), sum(event.sent for event in events)


GATHERS = "on CPU, torch's all-to-all is an all-gather, of which each rank keeps its part"
PIECES = "ours reduces a summand to pieces, which sends least before the operation; torch to the whole, in one message"
EQUAL = "torch's mean is one of equal pieces; of others, or of summands, it makes the whole first"
EMPTY = "torch does not cut a dim in more pieces than it has elements: it gathers, where ours goes on with empty ones"
WHOLE = "of a dim that must not be cut, torch gathers the pieces; ours cuts another dim instead, which sends less"
NORM = "torch's backward of a norm makes a gradient of summands whole; ours is linear in it, and goes on with them"
PRODUCT = "torch 2.11 multiplies no summands: it makes the whole of them first, and again in backward"
AT_ONCE = "torch weighs all ways on all axes at once, ours each axis by itself"
WHY = {
    "add ((4, 6), (4, 6)) as ('0', '1') on (2,)": GATHERS,
    "mean ((5, 4),) as ('0',) on (2,)": EQUAL,
    "mean ((5, 4),) as ('P',) on (2,)": EQUAL,
    "softmax{'dim': 1} ((4, 6),) as ('1',) on (2,)": WHOLE,
    "softmax{'dim': 1} ((4, 6),) as ('P',) on (2,)": PIECES,
    "relu ((6, 3),) as ('P',) on (4,)": PIECES,
    "plus_number ((4, 2),) as ('P',) on (3,)": PIECES,
    "matmul ((5, 7), (7, 2)) as ('R', '1') on (3,)": EMPTY,
    "layer_norm ((5, 4), (4,), (4,)) as ('1', 'R', 'R') on (2,)": WHOLE,
    "layer_norm ((5, 4),) as ('P',) on (2,)": PIECES,
    "rms_norm ((4, 6),) as ('P',) on (2,)": PIECES,
    "norm_mlp ((6, 4), (4,), (8, 4)) as ('R', 'R', '0') on (2,)": NORM,
    "norm_mlp ((4, 6, 4), (4,), (8, 4)) as ('0R', 'RR', 'R0') on (2, 2)": NORM,
    "cat{'dim': 0} ((4, 6), (4, 6)) as ('0', '0') on (2,)": WHOLE,
    "cat{'dim': 0} ((4, 6), (4, 6)) as ('0', 'R') on (2,)": WHOLE,
    "cat{'dim': 0} ((4, 6), (4, 6)) as ('P', '0') on (2,)": WHOLE,
    "cat{'dim': 1} ((4, 6), (4, 6)) as ('1', '1') on (2,)": WHOLE,
    "first_times_last{'dim': 0} ((4, 6),) as ('0',) on (2,)": WHOLE,
    "first_times_last{'dim': 1} ((4, 6),) as ('1',) on (2,)": WHOLE,
    "middle{'dim': 0} ((5, 4),) as ('0',) on (2,)": WHOLE,
    "middle{'dim': 1} ((5, 4),) as ('1',) on (2,)": WHOLE,
    "gelu_mlp ((6, 4), (8, 4), (4, 8)) as ('0', '0', '0') on (2,)": GATHERS,
    "gelu_mlp ((4, 6, 4), (8, 4), (4, 8)) as ('0R', '00', '00') on (2, 2)": AT_ONCE,
}


if torch.__version__ < "2.13":
    WHY |= {
        "mul ((4, 6), (4, 6)) as ('P', 'R') on (2,)": PRODUCT,
        "mul ((4, 6), (4, 6)) as ('P', 'P') on (2,)": PRODUCT,
        "div ((4, 6), (4, 6)) as ('P', 'R') on (2,)": PRODUCT,
        "first_times_last{'dim': 0} ((4, 6),) as ('P',) on (2,)": PRODUCT,
        "first_times_last{'dim': 1} ((4, 6),) as ('P',) on (2,)": PRODUCT,
    }
else:
    WHY["layer_norm ((2, 3, 4), (4,), (4,)) as ('0', 'R', 'R') on (4,)"] = EMPTY


def why(case):
    """Return why torch sends something else, or nothing."""
    if not hasattr(case.what, "to"):
        return WHY.get(str(case), "")
    there, back = (placements(ours, word) for word in (case.lie[0], case.what.to))
    there_again = [ours.Replicate() if placement.is_partial() else placement for placement in there]
    steps = plan(Spec(case.shapes[0], case.mesh, tuple(there)), back)
    steps += plan(Spec(case.shapes[0], case.mesh, tuple(back)), there_again)
    return GATHERS if any(step.move.collective == "all_to_all" for step in steps) else ""


def test_a_cut_that_a_view_cannot_keep_is_moved():
    """Check the gathered value. torch 2.13 has a fourth placement for this, _StridedShard; 2.11 refuses."""

    def body():
        x = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
        cut = ours.distribute_tensor(x, Mesh((2,), ("tp",)), [ours.Shard(1)])
        assert torch.equal(merge(cut).full_tensor(), merge(x))

    run(body, ranks=2)


def test_the_rows_that_differ_are_rows():
    assert len(CASES) > 200 and WHY.keys() <= set(map(str, CASES)) and len(set(map(str, CASES))) == len(CASES)


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [*((ranks, FEWER) for ranks in (2, 3, 4)), pytest.param(4, CASES, marks=pytest.mark.depth)],
    ids=["2", "3", "4", "4, with all moves"],
)
def test_numbers_and_collectives_are_those_of_one_process_and_of_torch(ranks, cases):
    cases = [case for case in cases if prod(case.mesh) == ranks]
    recording = run(both, cases, ranks=ranks, record="communication").recording
    for number, case in enumerate(cases):
        mine, torch_ = ([collectives(recording, r, 2 * number + i) for r in range(ranks)] for i in (0, 1))
        if reason := why(case):
            assert mine != torch_, f"{case} does not differ any more: {reason}"
        else:
            assert mine == torch_, f"{case}: (collectives, bytes) of each rank"
        if reason == GATHERS:
            assert max(mine) < max(torch_), case


# ---- strides, and missing gradients ----------------------------------------------------------------------


class NothingBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.detach() * 2

    @staticmethod
    def backward(ctx, gradient):
        return None


def in_and_out(x):
    return ours.DTensor.from_local(x.to_local(), x.device_mesh, x.placements)


ALONE = [
    lambda x: x.t().contiguous().view(-1),
    lambda x: x.t().clone(memory_format=torch.contiguous_format).view(3, 8),
    lambda x: x.t().clone(),
    lambda x: x.t() * 2,
    lambda x: x.t().reshape(-1),
    lambda x: x[:1].expand(4, 6).clone().view(-1),
    lambda x: x.view(4, 2, 3).transpose(1, 2).contiguous().view(4, 6),
    lambda x: x.view(2, 2, 2, 3).transpose(1, 2) @ x.view(2, 2, 2, 3).transpose(1, 2).mT,  # attention does this
    lambda x: x.abs(),
    lambda x: x.clamp(-0.5, 0.5),
    lambda x: x.clamp(max=0.5),
    lambda x: NothingBack.apply(x) * x,
    lambda x: NothingBack.apply(in_and_out(x) if isinstance(x, ours.DTensor) else x) * x,
    lambda x: NothingBack.apply(x.redistribute(placements=x.placements) if isinstance(x, ours.DTensor) else x) * x,
]


def test_strides_backwards_and_what_has_no_gradient_are_as_in_one_process():
    def body():
        mesh = Mesh((2,), ("tp",))
        values = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        for number, what in enumerate(ALONE):
            x = values.clone().requires_grad_()
            (y := what(x)).mul(weights(y)).sum().backward()
            for lie in "01R" if what in ALONE[-2:] else "01RP":
                mine = ours.distribute_tensor(values, mesh, placements(ours, lie), src_data_rank=None).requires_grad_()
                result = what(mine)
                (whole := result.full_tensor()).mul(weights(y)).sum().backward()
                assert result.stride() == y.stride() or lie == "P", (number, lie)
                for a, b in ((whole, y), (mine.grad.full_tensor(), x.grad)):
                    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=f"{number} {lie}")

        out = ours.distribute_tensor(values, mesh, [ours.Shard(0)])
        torch.add(out, out, out=out)
        assert torch.equal(out.full_tensor(), 2 * values)

    run(body, ranks=2)
