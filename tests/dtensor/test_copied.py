"""Tests of writes to parts of a DTensor, or to the whole: equal to one process, or refused on every rank."""

import re
from copy import deepcopy

import pytest
import torch
from torch import nn

from labs.dtensor import DTensor, Replicate, Shard, distribute_tensor
from labs.fsdp import fully_shard
from labs.kit.launch import run
from labs.mesh import Mesh


def later(take, use):
    """Return a function that takes a part, writes to the whole, and adds something made of the part to it."""

    def form(w):
        part = take(w)
        w.mul_(2)
        w.add_(use(part))

    return form


FORMS = {  # each changes w in place; the expected values are those of one process
    "[:2]": lambda w: w[:2].zero_(),
    "[:, 1:]": lambda w: w[:, 1:].add_(1),
    "[:, 1:3] =": lambda w: w.__setitem__((slice(None), slice(1, 3)), 1),
    "[:]": lambda w: w[:][:, :].zero_(),
    "[2:4].data": lambda w: w[2:4].data.zero_(),
    ".data[2:4]": lambda w: w.data[2:4].zero_(),
    ".data.view.data": lambda w: w.data.view(24).data.add_(1),
    "chunk(3)": lambda w: [nn.init.ones_(part) for part in w.chunk(3)],
    "chunk(2, 1)": lambda w: w.chunk(2, 1)[1].mul_(3),
    "split": lambda w: w.split([1, 5])[1].fill_(7),
    "narrow": lambda w: w.narrow(0, 2, 2).copy_(w[4:]),
    "out": lambda w: torch.add(w[:2], 1, out=w[2:4]),
    "foreach": lambda w: torch._foreach_zero_(list(w.split(2))),
    "view(24)": lambda w: w.view(24).add_(1),
    "reshape": lambda w: w.reshape(3, 8).sub_(1),
    "flatten of t": lambda w: w.t().unsqueeze(0).flatten(0, 1).mul_(2),
    "t, slice": lambda w: w.t()[1:].zero_(),
    "unflatten, slice": lambda w: w.unflatten(0, (3, 2))[:, 1:].zero_(),
    "expand": lambda w: w.unsqueeze(0).expand(1, 6, 4).add_(1),
    "a trained part": lambda w: trained(w[:2]),
    "clone": lambda w: w.add_(w[:2].clone().fill_(3).sum()),
    "read": lambda w: w.add_(w[:2].sum() + w.view(24).sum()),
    "read later": later(lambda w: w[:2], torch.sum),
    "read later, view": later(lambda w: w.view(24).detach(), torch.sum),
    "read later, whole": later(lambda w: w[2:4], lambda part: getattr(part, "full_tensor", part.clone)().sum()),
    "read later, block": later(lambda w: w.view(24), lambda part: getattr(part, "to_local", part.clone)().sum() * 0),
    "copied, read later": later(lambda w: deepcopy(w[:2].detach()).add_(1), torch.sum),
    "t_": lambda w: w.t_(),
    "unsqueeze_": lambda w: w.unsqueeze_(0),
    "squeeze_": lambda w: w.unsqueeze(0).squeeze_(0),
    "transpose_": lambda w: w.transpose_(0, 1),
}
LAYOUTS = [[Shard(0)], [Shard(1)], [Replicate()]]
COPY = r"(zero|add|mul|sub|fill|copy)_ writes to a part of a DTensor, a copy of|the whole was written to before a use"


def trained(part):
    part = nn.Parameter(part)
    part.grad = part.detach().clone()
    torch.optim.SGD([part], 1.0).step()


@torch.no_grad()
def outcome(form, w):
    try:
        FORMS[form](w)
    except (RuntimeError, NotImplementedError) as refusal:
        return str(refusal)
    return w.full_tensor() if isinstance(w, DTensor) else w


def outcomes():
    mesh = Mesh((2,), ("tp",))
    return {
        (form, number, is_parameter): outcome(form, nn.Parameter(w) if is_parameter else w)
        for form in FORMS
        for number, placements in enumerate(LAYOUTS)
        for is_parameter in (False, True)
        for w in [distribute_tensor(torch.arange(24.0).view(6, 4), mesh, placements)]
    }


def test_what_is_written_to_a_part_arrives_in_the_whole_or_is_refused_on_every_rank():
    refused = set()
    first, second = run(outcomes, ranks=2)
    for case, found in first.items():
        form, number, _ = case
        expected = outcome(form, torch.arange(24.0).view(6, 4))
        if isinstance(found, str):
            assert found == second[case]
            refused.add((form, number))
        else:
            assert torch.equal(found, expected) and torch.equal(second[case], expected), case
    in_place = [form for form in FORMS if form.endswith("_")]
    assert {form for form, number in refused if number == 2} == set(in_place), "a whole tensor shares its memory"
    for form, number in refused:
        sentence = f"{form} changes a tensor's shape in place, and a DTensor keeps" if form in in_place else COPY
        assert re.match(sentence, first[form, number, False])
    assert {("[:2]", 0), ("chunk(3)", 0), ("view(24)", 1), ("[:, 1:3] =", 1), ("[2:4].data", 0)} < refused
    assert {("[:2]", 1), ("chunk(3)", 1), ("view(24)", 0), ("clone", 0), ("read", 0), ("read", 1)}.isdisjoint(refused)


def test_a_shard_of_fsdp_refuses_what_would_be_lost():
    def body():
        model = fully_shard(nn.Embedding.from_pretrained(torch.ones(10, 4), freeze=False))
        with torch.no_grad():
            for write in (lambda w: w[8:].zero_(), lambda w: [nn.init.zeros_(part) for part in w.chunk(2)]):
                with pytest.raises(
                    RuntimeError, match=r"\(10, 4\) as \[Shard\(0\)\], had to move .*before fully_shard"
                ):
                    write(model.weight)
            with pytest.raises(
                RuntimeError, match=r"copy of shape \(2, 4\): what is written there would not reach the"
            ):
                model.weight[8:].to_local().zero_()
            assert model.weight[8:].clone().to_local().sum() == model.weight[:8].full_tensor().sum() / 8
            model.weight[:, 1:].zero_()
            whole = model.weight.full_tensor()
            whole[8:].fill_(5)
            model.weight.copy_(distribute_tensor(whole, model.weight.device_mesh, model.weight.placements))
        return model(torch.tensor([0, 9])).tolist()

    assert run(body, ranks=2) == [[[1, 0, 0, 0], [5, 5, 5, 5]]] * 2


def test_gradients_that_a_view_has_moved_are_added_up():
    def body():
        w = nn.Parameter(distribute_tensor(torch.ones(4, 6), Mesh((2,), ("tp",)), [Shard(1)]))
        x = distribute_tensor(torch.arange(24.0), w.device_mesh, [Shard(0)])
        for _ in range(2):
            (w.view(24) * x).sum().backward()
        w.grad.mul_(2)
        return w.grad.full_tensor()

    assert torch.equal(run(body, ranks=2)[0], torch.arange(24.0).view(4, 6) * 4)


def test_a_part_of_a_split_that_nothing_depends_on_has_no_gradient():
    def body():
        found = []
        for placements in LAYOUTS:
            w = nn.Parameter(distribute_tensor(torch.ones(4, 6), Mesh((2,), ("tp",)), placements))
            (w.chunk(2, 1)[0] * 3).sum().backward()
            ((w * 2).split([1, 3])[1]).sum().backward()
            found.append(w.grad.full_tensor())
        return found

    w = nn.Parameter(torch.ones(4, 6))
    ((w.chunk(2, 1)[0] * 3).sum() + (w * 2).split([1, 3])[1].sum()).backward()
    assert all(torch.equal(gradient, w.grad) for gradient in run(body, ranks=2)[0])
