"""Tests of labs.fsdp.order by a clock: which gathers were in flight while a layer computed."""

import torch
import torch.distributed as dist
from torch import nn

from labs.fsdp import fully_shard
from labs.kit.launch import run
from labs.mesh import Mesh


class Slow(nn.Module):
    """A layer that notes when its forward begins, and when its backward has ended."""

    def __init__(self, number, notes):
        super().__init__()
        self.number, self.notes = number, notes
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        self.notes.append(("forward", self.number))
        x = x.view_as(x)
        x.register_hook(lambda _: self.notes.append(("backward", self.number)))
        return self.linear(x)


class InOrder(nn.Module):
    """A model that runs its layers one after the other, in the order given to forward."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, order):
        for number in order:
            x = self.layers[number](x)
        return x


def in_flight(prefetch, *orders):
    """Return when layers computed, when each group was gathered and dropped, and the most held at once."""
    torch.manual_seed(0)
    notes, mesh = [], Mesh((dist.get_world_size(),), ("dp",))
    layers = [Slow(number, notes) for number in range(4)]
    model = fully_shard(InOrder([fully_shard(layer, mesh=mesh) for layer in layers]), mesh=mesh)
    for number, layer in enumerate(layers):
        group = layer._sharding.group

        def noted(what, number=number, group=group):
            original = getattr(group, what)

            def wrapper(*args):
                there = group.gathered or group.arriving
                value = original(*args)
                if bool(there) != bool(group.gathered or group.arriving):
                    notes.append((what, number))
                return value

            setattr(group, what, wrapper)

        noted("gather")
        noted("drop")
    if not prefetch:
        for layer in layers:
            layer.set_modules_to_forward_prefetch([])
            layer.set_modules_to_backward_prefetch([])
    for order in orders or [range(4)] * 2:  # the first step has no order to follow
        notes.clear()
        model(torch.ones(2, 8, requires_grad=True), order).sum().backward()
    held = most = 0
    for what, _ in notes:
        held += {"gather": 1, "drop": -1}.get(what, 0)
        most = max(most, held)
    return notes, most


def test_the_next_layer_is_gathered_while_one_computes():
    notes, most = run(in_flight, True, ranks=2)[0]
    order = {note: place for place, note in reversed([*enumerate(notes)])}
    last = {note: place for place, note in enumerate(notes)}
    for number in range(3):
        assert order["gather", number + 1] < order["forward", number]
        assert last["gather", number] < order["backward", number + 1]
    assert most == 2


def test_nothing_is_prefetched_if_a_forward_begins_differently_from_the_last():
    notes, _ = run(in_flight, True, [0, 1, 2, 3], [1, 0, 3, 2], ranks=2)[0]
    assert notes[:3] == [("gather", 0), ("gather", 1), ("forward", 1)]
    assert notes.index(("gather", 3)) < notes.index(("gather", 2)) < notes.index(("backward", 2))


def test_a_layer_used_twice_follows_another_layer_each_time():
    notes, _ = run(in_flight, True, *[[0, 1, 2, 1, 3]] * 2, ranks=2)[0]
    begun = [note for note in notes if note[0] in ("gather", "backward")]
    ends = begun[begun.index(("backward", 3)) :]
    assert [number for what, number in ends if what == "gather"] == [2, 1, 0]
    assert [number for what, number in ends if what == "backward"] == [3, 1, 2, 1, 0]


def test_a_needless_prefetch_is_dropped():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

        def forward(self, x, skip):
            for number, layer in enumerate(self.layers):
                x = x if number == skip else layer(x)
            return x

    def body():
        torch.manual_seed(0)
        mesh, model = Mesh((2,), ("dp",)), Skips()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.ones(2, 3), skip=0)
        with torch.no_grad():
            model(torch.ones(2, 3), skip=None)
            whole = model(torch.ones(2, 3), skip=2)
        held = [layer._sharding.group.gathered or layer._sharding.group.arriving for layer in model.layers]
        model(torch.ones(2, 3), skip=2).sum().backward()
        return whole, held, [layer.weight.grad is not None for layer in model.layers]

    for _, held, gradients in run(body, ranks=2):
        assert not any(held)
        assert gradients == [True, True, False]


def test_without_prefetch_each_layer_is_gathered_when_it_begins():
    notes, most = run(in_flight, False, ranks=2)[0]
    order = {note: place for place, note in reversed([*enumerate(notes)])}
    for number in range(3):
        assert order["gather", number + 1] > order["forward", number]
    assert most == 1


def test_unshard_may_begin_a_gather_and_leave_the_wait_to_whoever_needs_it():
    """Check it before the first forward, too, which knows no order yet."""

    def body(early):
        torch.manual_seed(0)
        mesh, model = Mesh((2,), ("dp",)), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        for layer in model:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        group, handle = model[0]._sharding.group, None
        if early != "not":
            handle = model[0].unshard(async_op=early == "began")
            states = bool(group.arriving), group.gathered
            assert states == ((True, False) if early == "began" else (False, True))
            assert (handle is None) == (early == "waited")
        y = model(torch.ones(2, 3))
        y.sum().backward()
        if early == "began":
            model[1].unshard(async_op=True).wait()
            assert model[1].weight.shape == (3, 3) and model[1]._sharding.group.gathered
            model[1].reshard()
            handle.wait()  # a wait after its forward and its backward has nothing to wait for
            assert not any(layer._sharding.group.gathered for layer in model)
        return y.tolist(), model[0].weight.grad.to_local().tolist()

    found = [run(body, early, ranks=2)[0] for early in ("not", "began", "waited")]
    assert found[0] == found[1] == found[2]
