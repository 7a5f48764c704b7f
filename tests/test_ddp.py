"""Tests of labs.ddp against one process that sees the same micro-batches one after the other.

The reference never communicates: for each step it computes the gradient of each rank's part of the batch, adds the
gradients in the order of the ranks, and divides.  Two numbers can be added in only one way, so with two ranks float32
must be bitwise equal.  With more, rounding depends on the order, and float64 shows that nothing else does.
"""

import contextlib
import functools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from labs import collectives
from labs.ddp import Bucketed, Naive, Overlapped, in_buckets
from labs.kit.launch import run
from tests.depth import deepen
from tests.models import Awkward, batch, trained_alone

VARIANTS = {
    "naive": Naive,
    "bucketed": lambda model, **options: Bucketed(model, bucket_bytes=1000, **options),
    "overlapped": lambda model, **options: Overlapped(model, bucket_bytes=1000, **options),
}
CASES = [(dtype, accumulation) for dtype in (torch.float32, torch.float64) for accumulation in (1, 3)]


def of(variant):
    """Return a message for assert_close that says whose numbers differ."""
    return lambda message: f"{variant}: {message}"


@functools.cache
def references(ranks):
    """Return `reference` in each dtype and accumulation, from a process like those of the ranks (as many threads)."""
    return run(lambda: [reference(ranks, *case) for case in CASES], ranks=1)[0]


def reference(ranks, dtype, accumulation):
    model = Awkward(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained_alone(model, optimizer, lambda *at: model(batch(*at)), ranks, 10, accumulation)
    return list(model.parameters())


def train(variant, dtype, accumulation=1, steps=10, **options):
    model = VARIANTS[variant](Awkward(dtype), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(accumulation):
            last = i == accumulation - 1
            with contextlib.nullcontext() if last else model.no_sync():
                loss = model(batch(step, dist.get_rank() * accumulation + i)) / accumulation
                loss.backward()
                model.sync()
        optimizer.step()
    return list(model.module.parameters())


# ---- numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [3, *deepen(1, 2, 4)])
def test_equals_one_process(ranks):
    def body():
        return {variant: [train(variant, *case) for case in CASES] for variant in VARIANTS}

    for results in run(body, ranks=ranks):
        for variant in VARIANTS:
            for (dtype, _), mine, single in zip(CASES, results[variant], references(ranks), strict=True):
                exact = 0 if ranks <= 2 else 1e-5
                rtol, atol = (0, 1e-12) if dtype == torch.float64 else (exact, exact)
                torch.testing.assert_close(mine, single, rtol=rtol, atol=atol, msg=of(variant))


def test_our_own_ring_is_one_argument():
    def body():
        ring = collectives.all_reduce
        return {variant: train(variant, *CASES[0], all_reduce=ring) for variant in VARIANTS}

    for results in run(body, ranks=2):
        for variant, mine in results.items():
            torch.testing.assert_close(mine, references(2)[0], rtol=0, atol=0, msg=of(variant))


def test_within_a_subgroup():
    def body():
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        gradients = {}
        for variant, wrap in VARIANTS.items():
            model = Awkward(seed=dist.get_rank() % 2)  # replicas within each group only
            model = wrap(model, group=groups[dist.get_rank() % 2])
            model(batch(0, dist.get_rank())).backward()
            model.sync()
            gradients[variant] = [p.grad for p in model.trainable.values()]
        return gradients

    a, b, c, d = run(body, ranks=4)
    for variant in VARIANTS:
        torch.testing.assert_close([a[variant], b[variant]], [c[variant], d[variant]], rtol=0, atol=0)
        assert not torch.equal(a[variant][0], b[variant][0]), variant


# ---- unused, tied, frozen --------------------------------------------------------------------------------


def with_branch(variant, used, find_unused=True):
    """Take a step in which only the ranks in `used` use the branch: gradients by name, and parameters."""
    model = Awkward(torch.float64)
    model.branch.requires_grad_(True)
    model = VARIANTS[variant](model, find_unused=find_unused)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch(0, dist.get_rank()), branch=dist.get_rank() in used).backward()
    model.sync()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.trainable.items()}
    optimizer.step()
    return gradients, list(model.parameters())


def test_unused_parameters():
    ways = [{0, 1, 2}, {1}, set()]
    jobs = run(lambda: [{variant: with_branch(variant, used) for variant in VARIANTS} for used in ways], ranks=3)
    for number, used in enumerate(ways):
        single = Awkward(torch.float64)
        single.branch.requires_grad_(True)
        optimizer = torch.optim.AdamW(single.parameters())
        for rank in range(3):
            (single(batch(0, rank), branch=rank in used) / 3).backward()
        optimizer.step()
        for variant, (gradients, parameters) in (case for results in jobs for case in results[number].items()):
            assert (gradients["branch.weight"] is None) == (not used)
            for name, p in single.named_parameters():
                if p.requires_grad:
                    torch.testing.assert_close(gradients[name], p.grad, rtol=0, atol=1e-13)
            torch.testing.assert_close(parameters, list(single.parameters()), rtol=0, atol=1e-12, msg=of(variant))


def test_unused_parameters_are_named():
    def body():
        for variant in VARIANTS:
            message = r"rank \d has no gradient for 'branch.weight', 'branch.bias': .*find_unused=True"
            with pytest.raises(RuntimeError, match=message):
                with_branch(variant, set(), find_unused=False)
            dist.barrier()

    run(body, ranks=2)


def test_tied_parameters_travel_once_and_complete():
    def body():
        sent, states = [], []

        def all_reduce(tensor, **options):
            sent.append(tensor.numel())
            return dist.all_reduce(tensor, **options)

        # the hook of `single` comes before the wrapper's, whose all-reduce changes the gradient at the same time
        single = Awkward()
        single.embed.weight.register_post_accumulate_grad_hook(lambda p: states.append(p.grad.clone()))
        model = Overlapped(single, bucket_bytes=1, all_reduce=all_reduce)
        model(batch(0, 0)).backward()  # the same batch on both ranks: the mean is each rank's own gradient
        model.sync()
        return sorted(sent), len(states), torch.equal(states[0], model.module.embed.weight.grad)

    trainable = sorted(p.numel() for p in Awkward().parameters() if p.requires_grad)
    assert run(body, ranks=2) == [(trainable, 1, True)] * 2


# ---- buffers ---------------------------------------------------------------------------------------------


def test_buffers_are_rank_0s_in_training():
    def statistics(wrap):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        seen = []
        for step in range(3):
            x = torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
            with contextlib.nullcontext() if step else model.no_sync():
                model(x).square().mean().backward()
                model.sync()
            seen.append(model.module[1].running_mean.clone())
        model.eval()
        with torch.no_grad():
            if dist.get_rank() == 0:
                model(torch.zeros(1, 3))  # sends nothing: rank 0 may evaluate alone
        return seen

    results = run(lambda: [statistics(wrap) for wrap in VARIANTS.values()], ranks=2)
    torch.manual_seed(0)
    linear, norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
    for step in range(3):
        norm(linear(torch.randn(6, 3, generator=torch.Generator().manual_seed(10 * step))))
        for seen in results[0]:
            torch.testing.assert_close(seen[step], norm.running_mean, rtol=1e-5, atol=1e-6)


def test_a_buffer_of_another_rank_is_overwritten():
    def body():
        torch.manual_seed(0)
        model = Naive(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=0.0)))
        model.module[1].running_mean.fill_(dist.get_rank())
        model(torch.zeros(2, 3))
        model(torch.zeros(2, 3))
        return model.module[1].running_mean.tolist()

    assert run(body, ranks=2) == [[0.0] * 4] * 2


def test_all_ranks_evaluate_the_same_model():
    def body():
        found = []
        for wrap in VARIANTS.values():
            norm = nn.BatchNorm1d(1)
            norm.running_mean.fill_(dist.get_rank())
            model = wrap(norm)
            with model.no_sync():
                start = norm.running_mean.item()
                model(torch.tensor([[0.0], [2.0]]) + 10 * dist.get_rank()).sum().backward()
            model(torch.tensor([[0.0], [2.0]]) + 10 * dist.get_rank()).sum().backward()
            model.sync()
            found += [start, norm.running_mean.item(), norm.num_batches_tracked.item()]
        return found

    assert run(body, ranks=2) == [pytest.approx([0.0, 0.19, 2] * 3)] * 2


class Views(nn.Module):
    """A model whose ranks have other numbers in their buffers, and their weight in another order in memory."""

    def __init__(self):
        super().__init__()
        rank, weight = dist.get_rank(), torch.zeros(2, 3)
        self.weight = nn.Parameter(weight.t().contiguous().t() if rank else weight)
        self.whole = torch.arange(12.0).view(3, 4) + 100 * rank
        self.register_buffer("columns", self.whole[:, :2])
        self.register_buffer("turned", self.whole.clone().t())
        self.register_buffer("expanded", torch.full((2, 1), 1.0 + rank).expand(2, 50_000))  # more than its memory

    def forward(self):
        return (self.weight * torch.arange(6.0).view(2, 3)).sum() * (1 + dist.get_rank())


def test_what_lies_in_memory_in_another_way_is_sent_as_well():
    def body():
        for wrap in VARIANTS.values():
            model = wrap(views := Views())
            model().backward()
            model.sync()
            yield [*views.buffers(), views.weight.grad], views.whole[:, 2:] - 100 * dist.get_rank()

    first, *others = [case for rank in run(lambda: list(body()), ranks=2) for case in rank]
    (columns, turned, expanded, gradient), beside = first
    whole = torch.arange(12.0).view(3, 4)
    assert torch.equal(columns, whole[:, :2]) and torch.equal(turned, whole.t()) and torch.equal(beside, whole[:, 2:])
    assert (expanded == 1).all() and torch.equal(gradient, 1.5 * torch.arange(6.0).view(2, 3))
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0)


# ---- order -----------------------------------------------------------------------------------------------


def order_of_events(variant, bucket_bytes):
    """Return ("gradient", elements), ("all_reduce", elements), ("end of backward",) in the order of one step."""
    events = []

    def all_reduce(tensor, **options):
        events.append(("all_reduce", tensor.numel(), time.monotonic()))
        return dist.all_reduce(tensor, **options)

    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(4)))
    for p in layers.parameters():
        p.register_post_accumulate_grad_hook(lambda p: events.append(("gradient", p.numel(), time.monotonic())))
    model = variant(layers, bucket_bytes=bucket_bytes, all_reduce=all_reduce)
    model(torch.ones(2, 10)).sum().backward()
    events.append(("end of backward", 0, time.monotonic()))
    model.sync()
    return events


def test_the_first_all_reduce_starts_before_the_last_gradient_exists():
    for events in run(order_of_events, Overlapped, 800, ranks=2):
        names = [(name, size) for name, size, _ in events]
        two = [("gradient", 100), ("gradient", 100), ("all_reduce", 200)]
        assert names == [*two, *two, ("end of backward", 0)]
        times = [time for _, _, time in events]
        assert times == sorted(times)
    for events in run(order_of_events, Bucketed, 800, ranks=2):
        names = [name for name, _, _ in events]
        assert names == ["gradient"] * 4 + ["end of backward"] + ["all_reduce"] * 2


def test_buckets_start_in_the_same_order_where_gradients_do_not():
    def body():
        events = []

        def all_reduce(tensor, **options):
            events.append(tensor.numel())
            return dist.all_reduce(tensor, **options)

        torch.manual_seed(0)
        first, second = nn.Linear(2, 3, bias=False), nn.Linear(2, 5, bias=False)
        model = Overlapped(nn.ModuleList([first, second]), bucket_bytes=1, all_reduce=all_reduce)
        layers = [first, second] if dist.get_rank() else [second, first]
        sum(layer(torch.ones(1, 2)).sum() for layer in layers).backward()
        model.sync()
        return events

    assert run(body, ranks=2) == [[10, 6]] * 2


def test_no_sync_sends_nothing():
    def body():
        sent = []

        def all_reduce(tensor, **options):
            sent.append(tensor.numel())
            return dist.all_reduce(tensor, **options)

        model = Overlapped(Awkward(), all_reduce=all_reduce)
        with model.no_sync():
            model(batch(0, 0)).backward()
            model.sync()
        return sent

    assert run(body, ranks=2) == [[], []]


def test_buckets_cut_the_parameters_from_the_last_one():
    parameters = [nn.Parameter(torch.zeros(n)) for n in (5, 4, 3, 2, 1)]
    sizes = [[p.numel() for p in bucket] for bucket in in_buckets(parameters, bucket_bytes=12)]
    assert sizes == [[1, 2], [3], [4], [5]]
    mixed = [*parameters[:2], nn.Parameter(torch.zeros(3, dtype=torch.float64))]
    assert [[p.numel() for p in bucket] for bucket in in_buckets(mixed, 10**9)] == [[3], [4, 5]]


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3])
def test_replicas_must_start_equal(ranks):
    def body():
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        model = Awkward()
        with torch.no_grad():
            if rank == last:  # two elements exchanged: the same values, in other places
                model.branch.bias[[0, 1]] = model.branch.bias[[1, 0]]
        with pytest.raises(ValueError, match=rf"parameter 'branch.bias' is .* on rank {last}; .*same seed"):
            Naive(model)
        with pytest.raises(ValueError, match=r"'0.weight' is .*\(3, 2\).* on rank 0, but .*\(3, 4\)"):
            Naive(nn.Sequential(nn.Linear(2 if rank < last else 4, 3)))
        with pytest.raises(ValueError, match=rf"'0.bias' is .* on rank 0, but absent on rank {last}"):
            torch.manual_seed(0)
            Naive(nn.Sequential(nn.Linear(2, 3, bias=rank < last)))

    run(body, ranks=ranks)


def test_bad_input_is_named():
    def body():
        with pytest.raises(ValueError, match="ReLU has no trainable parameters"):
            Naive(nn.ReLU())
        for variant in (Bucketed, Overlapped):
            with pytest.raises(ValueError, match="bucket_bytes is 0"):
                variant(Awkward(), bucket_bytes=0)
        with pytest.raises(RuntimeError, match=r"no gradient at all: call loss.backward"):
            Naive(Awkward()).sync()
        model = Overlapped(Awkward())
        model(batch(0, 0)).backward()
        with pytest.raises(RuntimeError, match=r"run every backward\(\) but the last within no_sync\(\)"):
            model(batch(0, 0)).backward()
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        model = Overlapped(layer)
        x = checkpoint(model, torch.ones(2, 3, requires_grad=True), use_reentrant=True)
        with pytest.raises(RuntimeError, match=r"give checkpoint\(\) use_reentrant=False"):
            layer(x).sum().backward()

    run(body, ranks=1)


def test_after_a_backward_that_failed_a_new_step_is_refused_in_words():
    def body():
        model = Overlapped(Awkward(), bucket_bytes=1)
        broken = model.module.layers[0].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(batch(0, 0)).backward()
        broken.remove()
        model.zero_grad()
        with pytest.raises(RuntimeError, match=r"after a backward\(\) that failed wrap the model anew"):
            model(batch(0, 0)).backward()

    run(body, ranks=1)


def test_a_buffer_that_is_a_view_is_not_written_to_where_it_is_the_same():
    def body():
        model = nn.Linear(3, 2)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
        model.register_buffer("mask", torch.ones(3, 2).t())
        model.forward = lambda x: nn.functional.linear(x, model.weight * model.mask, model.bias)
        wrapped = Naive(model)
        (wrapped(torch.ones(1, 3)) + wrapped(torch.ones(1, 3))).sum().backward()
        wrapped.sync()
        return model.weight.grad.sum().item()

    assert run(body, ranks=2) == [12, 12]


def test_a_gradient_that_was_kept_stays_as_it_was():
    """Gradient surgery keeps the gradient itself, and SAM's first backward may run within no_sync()."""

    def body():
        kept = []
        for wrap in VARIANTS.values():
            torch.manual_seed(0)
            model = wrap(nn.Linear(2, 1))
            for x in (1.0, 10.0, 100.0):
                model.zero_grad()
                with model.no_sync() if x == 1.0 else contextlib.nullcontext():
                    model(torch.full((1, 2), x)).sum().backward()
                    model.sync()
                kept.append(model.module.weight.grad.flatten() if x == 1.0 else model.module.weight.grad)
            model(torch.full((1, 2), 1000.0)).sum().backward()  # without zero_grad, it adds to the last one
            model.sync()
            kept.append(model.module.weight.grad)
        return [gradient.flatten().tolist() for gradient in kept]

    expected = [[x, x] for x in (1.0, 10.0, 1100.0, 1100.0)]
    assert run(body, ranks=2) == [expected * len(VARIANTS)] * 2


def test_a_model_that_is_converted_after_it_was_wrapped():
    def body():
        found = []
        for wrap in VARIANTS.values():
            torch.manual_seed(0)
            model = wrap(nn.Linear(1, 1, bias=False))
            model.bfloat16()
            model(torch.full((1, 1), 1.0 + 2 * dist.get_rank(), dtype=torch.bfloat16)).sum().backward()
            model.sync()
            found.append((model.module.weight.grad.item(), model.module.weight.grad.dtype))
        return found

    assert run(body, ranks=2) == [[(2.0, torch.bfloat16)] * len(VARIANTS)] * 2


@pytest.mark.filterwarnings("ignore:Using backward")
def test_what_pytorchs_has_and_ours_has_not_is_told_with_the_way_out():
    def body():
        for wrap in VARIANTS.values():
            model = wrap(nn.Linear(1, 1))
            with pytest.raises(RuntimeError, match=r"create_graph=True.*torch.autograd.grad\("):
                model(torch.ones(1, 1)).pow(2).sum().backward(create_graph=True)
                model.sync()
            with pytest.raises(AttributeError, match=r"register_comm_hook: .*all_reduce="):
                model.register_comm_hook(None, None)
            with pytest.raises(AttributeError, match=r"has no join: .*same number of batches"), model.join():
                pass
            with pytest.raises(TypeError, match="has no find_unused_parameters=: give find_unused="):
                wrap(nn.Linear(1, 1), find_unused_parameters=True)
            model = wrap(nn.Linear(1, 1, bias=False))
            torch.func.functional_call(model, {"module.weight": torch.ones(1, 1)}, torch.ones(1, 1, requires_grad=True))
            with pytest.raises(RuntimeError, match=r"no gradient at all: .*functional_call lends"):
                model.sync()
            layer = nn.Linear(1, 1)
            nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, ["bias"])
            with pytest.raises(ValueError, match="that DDP is to ignore: all parameters are averaged: freeze"):
                wrap(layer)

    run(body, ranks=1)


def test_complex_parameters_are_averaged():
    def body():
        gradients = []
        for wrap in VARIANTS.values():
            model = nn.Linear(2, 1, bias=False, dtype=torch.complex128)
            nn.init.ones_(model.weight)
            wrapped = wrap(model)
            wrapped(torch.full((1, 2), 1.0 + dist.get_rank(), dtype=torch.complex128)).abs().sum().backward()
            wrapped.sync()
            gradients.append(model.weight.grad.tolist())
        return gradients

    assert run(body, ranks=2) == [[[[1.5, 1.5]]] * len(VARIANTS)] * 2


def test_a_mean_of_float16_whose_sum_would_overflow():
    def body():
        found = []
        for way in (Naive, Bucketed, Overlapped):
            torch.manual_seed(0)
            model = way(nn.Linear(1, 1, bias=False).half())
            (40000.0 * model(torch.ones(1, 1, dtype=torch.float16)).float().sum()).backward()
            model.sync()
            found.append(model.module.weight.grad.item())
        return found

    assert list(run(body, ranks=2)) == [[40000.0] * 3] * 2
