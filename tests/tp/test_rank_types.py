"""Tests of the types over ranks: the table against numbers and gradients, and the sentences of the checker."""

from itertools import combinations_with_replacement, product
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from labs.dtensor import Partial, Replicate, Shard
from labs.tp import conjugate
from labs.tp.rank_types import COLLECTIVES, GRADIENT, TABLE, copy, gather, join, reduce, rows, typed

RANKS = 2


def same(xs):
    return xs


def total(xs):
    return [sum(xs)] * RANKS


def whole(xs):
    return [torch.cat(xs)] * RANKS


def pieces(xs):
    return [x.chunk(RANKS)[rank] for rank, x in enumerate(xs)]


def summed_pieces(xs):
    return pieces(total(xs))


def exchanged(xs):
    return [torch.cat([x.chunk(RANKS)[rank] for x in xs]) for rank in range(RANKS)]


def on_the_first(xs):
    return [xs[0], *map(torch.zeros_like, xs[1:])]


WAYS = {  # a collective in forward and in backward: from a list with each rank's tensor to another one
    "copy": (same, total),
    "reduce": (total, same),
    "all_reduce": (total, total),
    "gather": (whole, summed_pieces),
    "scatter": (summed_pieces, whole),
    "join": (whole, pieces),
    "split": (pieces, whole),
    "once": (same, on_the_first),
    "all_to_all": (exchanged, exchanged),
}
LOCAL = {"product": torch.mul, "rows": torch.mul, "sum": torch.add, "relu": lambda x, y: (x * y).sigmoid()}


def on_ranks(letter, x):
    """Return each rank's tensor, of a whole one; of a varying one, x has those of all ranks along dim 0."""
    noise = torch.randn_like(x.detach())
    return {"V": list(x.unbind()), "P": [x / 2 + noise, x / 2 - noise]}.get(letter, [x] * RANKS)


def whole_of(letter, xs):
    return {"V": torch.stack, "P": sum}.get(letter, lambda xs: xs[0])(xs)


def holds(letter, xs):
    return letter in "VP" or all(torch.allclose(x, xs[0]) for x in xs)


def is_sound(operation, letters, result):
    """Return whether an operation gives a tensor of this type, and the operands gradients of the promised types.

    The expected gradients are autograd's, in one process that has the tensors of all ranks.
    """
    wholes = [torch.randn((RANKS, 4) if x == "V" else 4, dtype=torch.float64, requires_grad=True) for x in letters]

    def forward(local):
        operands = [[local(x) for x in on_ranks(*pair)] for pair in zip(letters, wholes, strict=True)]
        return operands, [*map(LOCAL[operation], *operands)] if operation in LOCAL else WAYS[operation][0](*operands)

    (_, out), (_, again) = forward(same), forward(same)
    made = whole_of(result, out)
    if not holds(result, out) or not torch.allclose(made, whole_of(result, again)):
        return False
    gradient = torch.randn_like(made)
    expected = torch.autograd.grad(made, wholes, gradient, allow_unused=True, materialize_grads=True)
    gradients = on_ranks(GRADIENT[result], gradient)
    if operation in COLLECTIVES:
        found = [WAYS[operation][1](gradients)]
    else:
        operands, alone = forward(lambda x: x.detach().requires_grad_())
        each = zip(alone, zip(*operands, strict=True), gradients, strict=True)
        found = zip(*(torch.autograd.grad(*one) for one in each), strict=True)
    types = [GRADIENT[letter] for letter in letters]
    return all(
        holds(x, g) and whole_of(x, g).shape == e.shape and torch.allclose(whole_of(x, g), e)
        for x, g, e in zip(types, found, expected, strict=True)
    )


def passes_as(letter):
    """Return the types as which a tensor passes unchanged: a replicated one is varying, too, and that is partial."""
    return {"R": "RVP", "V": "VP"}.get(letter, letter)


@pytest.mark.parametrize("operation", TABLE)
def test_the_table_has_what_numbers_and_gradients_allow(operation):
    torch.manual_seed(0)
    for letters in combinations_with_replacement("IPRV", 1 if operation in COLLECTIVES else 2):
        sound = {result for result in "IPRV" if is_sound(operation, letters, result)}
        taken = [key for all_ in product(*map(passes_as, letters)) for key in (all_, sorted({*all_}))]
        allowed = {x for key in taken for x in passes_as(TABLE[operation].get("".join(sorted(key)), ""))}
        if operation == "rows":  # the function of `product`, but each rank has a part of both operands
            sound &= {"P"} if {*letters} <= {*"RV"} else set()
        if (operation, *letters) == ("all_reduce", "I"):  # N times a tensor: nobody means it
            sound = set()
        assert sound == allowed, letters


def test_the_types_are_those_of_the_borders(monkeypatch):
    letters = {
        (Replicate, Partial): "R",
        (Replicate, Replicate): "I",
        (Shard, Shard): "V",
        (Partial, Replicate): "P",
    }
    mesh = SimpleNamespace(size=lambda: 2, get_local_rank=lambda: 0, get_group=lambda: None)
    monkeypatch.setattr(conjugate.Border, "apply", lambda x, line, *ways: [list(map(type, way)) for way in ways])
    for name in COLLECTIVES.keys() - {"all_reduce", "all_to_all"}:
        dim = () if name in ("copy", "reduce", "once") else (0,)
        forward, backward = getattr(conjugate, name)(torch.ones(2), mesh, *dim)
        assert COLLECTIVES[name] == {letters[forward[0], backward[1]]: letters[forward[1], backward[0]]}


def refusal(program, **given):
    with pytest.raises(TypeError) as caught:
        typed(program, **given)
    return str(caught.value)


def test_a_refusal_names_the_types_and_the_call():
    assert refusal(lambda x, up: reduce(rows(torch.relu(x @ up), up)), x="I", up="V") == (
        "x @ up: along tp, x is invariant and up is varying (IV), which it refuses: write copy(x)"
    )
    assert refusal(lambda x, up: join(x) @ up, x="V", up="V") == (
        "join(x) @ up: along tp, join(x) is invariant and up is varying (IV), which it refuses: "
        "write gather(x) instead of join or write copy(join(x))"
    )
    assert refusal(lambda x, up: rows(x, up), x="V", up="V") == (
        "return: along tp, rows(x, up) is partial (P), and it takes I: write reduce(rows(x, up))"
    )
    assert refusal(lambda x, bias: reduce(F.linear(x, x, bias)), x="V", bias="I").endswith(": write copy(bias)")
    assert refusal(lambda q, v: reduce(F.scaled_dot_product_attention(q, q, v)), q="V", v="R").endswith(
        "is varying (V), and it takes P: no single collective mends it"
    )


def test_each_axis_is_checked_by_itself():
    def layer(x, up, down):
        return reduce(rows(copy(x) @ up, copy(down, axis="dp")))

    types = {"axes": ("dp", "tp"), "returns": "VI", "x": "VI", "up": "RV", "down": "IV"}
    assert str(typed(layer, **types)).splitlines()[-1].split()[-2:] == ["VI", "VI"]
    assert refusal(lambda x, up, down: layer(x, up, gather(down)), **types).startswith(
        "rows(copy(x) @ up, copy(gather(down), axis='dp')): along tp, copy(x) @ up is varying"
    )
    assert refusal(lambda x, up, down: x @ down, **types).endswith(": write copy(down, axis='dp')")


@pytest.mark.parametrize("given", [{"x": "IV"}, {"x": "S"}, {"x": "V", "returns": "II"}, {"x": "I"}])
def test_letters_and_axes_that_do_not_exist_are_refused(given):
    words = r"give one of the letters R, I, V, P for each axis of \('tp',\)|axis='cp'\): the axes are \('tp',\)"
    with pytest.raises(ValueError, match=words):
        typed(lambda x: copy(x, axis="cp"), **given)
