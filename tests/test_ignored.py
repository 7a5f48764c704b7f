"""Tests of ignored targets (-100): every row of the table takes the steps of one process that reads the whole batch.

The reference is model(x, y) on the whole batch, in one process, in float64.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import ddp, fsdp, pp
from labs.kit.launch import run
from labs.kit.training import strategies
from labs.model import GPT, Config, counted
from labs.zero import Zero
from tests.depth import deepen

SMALL = Config(vocab=23, dim=16, depth=4, heads=4, kv_heads=4, hidden=20, context=8)
STEPS = 2


def build():
    return GPT(SMALL).double()


def whole():
    """Return batches in which one sequence has no target at all, and others have few."""
    x, y = torch.randint(23, (2, STEPS, 8, 8), generator=torch.Generator().manual_seed(0))
    y[:, 0], y[:, 1, 2:], y[:, 5, :7] = -100, -100, -100
    return [*zip(x, y, strict=True)]


def in_parts(parts):
    cut = [zip(x.chunk(parts), y.chunk(parts), strict=True) for x, y in whole()]
    return [*map(list, zip(*cut, strict=True))]


def expected():
    """Return the losses of one process, and its parameters by name."""
    model, losses = build(), []
    optimizer = torch.optim.AdamW(model.parameters(), **strategies.ADAMW)
    for x, y in whole():
        losses.append(model(x, y))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach(), dict(model.named_parameters())


def rows_that_fit(ranks):
    rows = [row for row in strategies.STRATEGIES if row.fits(ranks) and row.ranks(ranks) == ranks]
    return [row.name for row in rows if row.computes is not torch.bfloat16]


TWO, FOUR = rows_that_fit(2), rows_that_fit(4)


def all_rows(names, cuts):
    losses, parameters = expected()
    for name in names:
        row, found = strategies.ROWS[name], []
        for micro_batches in cuts:
            batches = in_parts(row.parts(dist.get_world_size()))
            own, kept = strategies.train(row, build, batches, micro_batches, keep=STEPS)
            largest = max((kept[name] - p).abs().max().item() for name, p in parameters.items())
            assert largest < 1e-12, (name, micro_batches, largest)
            found.append(own)
        yield name, found[0], losses.tolist()


def every_row(names, cuts):
    return list(all_rows(names, cuts))


@pytest.mark.parametrize("cuts", [(2,), *deepen((1, 2))], ids=["two parts", "whole and two parts"])
@pytest.mark.parametrize(
    ("ranks", "names"),
    [(2, TWO), (4, [name for name in FOUR if name not in TWO]), pytest.param(4, FOUR, marks=pytest.mark.depth)],
    ids=["two", "four", "all on four"],
)
def test_every_row_weighs_by_the_targets_that_count_in_the_whole_batch(ranks, names, cuts):
    """Train on a batch cut into micro-batches, and in depth on the whole batch, too."""
    assert names
    for of_ranks in zip(*run(every_row, names, cuts, ranks=ranks, device="cpu"), strict=True):
        name, _, losses = of_ranks[0]
        found = [own for _, own, _ in of_ranks if own]
        mean = [sum(step) / len(found) for step in zip(*found, strict=True)]
        assert mean == pytest.approx(losses, abs=1e-12), name


def by_hand():
    """Check that a part is refused where its gradient is averaged, and right where the number of targets is passed."""
    rank, (x, y) = dist.get_rank(), whole()[0]
    reference = build()
    reference(x, y).backward()
    own_x, own_y = x.chunk(2)[rank], y.chunk(2)[rank]
    for wrap in (
        ddp.Naive,
        ddp.Bucketed,
        ddp.Overlapped,
        fsdp.fully_shard,
        lambda m: (Zero(m, 2, torch.optim.SGD), m)[1],
    ):
        with pytest.raises(ValueError, match=r"^a target is -100, .* give model\(x, y, over=n\)"):
            wrap(build())(own_x, own_y)
    model = ddp.Overlapped(build())
    model(own_x, own_y, over=counted(y) / 2).backward()
    model.sync()
    assert all(map(close, model.module.parameters(), reference.parameters()))
    for name, schedule in pp.SCHEDULES.items():
        lists = schedule(2, 4)
        model = build()
        stages = pp.cut(model, 1 + max(i.stage for order in lists for i in order))
        pipeline = pp.Pipeline(stages, lists, model.loss)
        losses = pipeline.forward_backward(x, y)
        assert all(
            close(p, reference.get_parameter(key)) for s in pipeline.stages.values() for key, p in s.named_parameters()
        )
        evaluated = pipeline.evaluate(x, y)
        for found in (losses, evaluated) if losses else ():
            assert torch.stack(found).mean().item() == pytest.approx(reference(x, y).item()), name
    model = build()
    pipeline = pp.Pipeline(
        pp.cut(model, 2),
        pp.gpipe(2, 4),
        lambda logits, y: nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()),
    )
    with pytest.raises(ValueError, match=r"^21 of 64 targets are -100, .*; let the loss be labs.model.CrossEntropy"):
        pipeline.forward_backward(x, y)
    groups = [dist.new_group([r]) for r in range(2)]
    pipeline = pp.Pipeline([model], pp.gpipe(1, 4), model.loss, groups[rank])
    with pytest.raises(
        ValueError, match=r"^21 of 64 targets are -100, .*; give over=, the number of targets that count in the whole"
    ):
        pipeline.forward_backward(x, y)


def close(p, q):
    return (p.grad - q.grad).abs().max() < 1e-12


def test_a_part_by_itself_is_refused_or_right():
    run(by_hand, ranks=2)


def bits():
    x, y = whole()[0][0], whole()[0][0].flip(1)
    models = [build(), build()]
    models[0](x, y).backward()
    models[1](x, y, over=counted(y)).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*(m.parameters() for m in models), strict=True))


def test_where_nothing_is_ignored_the_bits_are_the_same():
    bits()
