"""Tests of labs.memory.precision against torch's float32 AdamW and SGD, with the same gradients, cast, bit by bit.

With several ranks the reference is one process in the same precision, which adds up the gradients of every rank's part
in the order of the ranks. The loss scale is checked against arithmetic by hand.
"""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import ddp
from labs.clip import clip_gradients
from labs.kit.launch import run
from labs.kit.record import mark
from labs.memory.precision import LossScale, Masters
from labs.model import GPT, Config
from labs.zero import Zero
from tests.depth import deepen
from tests.models import trained_alone

OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "sgd": partial(torch.optim.SGD, lr=1e-1, momentum=0.9, weight_decay=0.1),
}
SHAPES = [(5, 3), (7,), (), (0,)]


def random(shape, seed, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameters(dtype):
    return [nn.Parameter(random(shape, i, dtype)) for i, shape in enumerate(SHAPES)]


def feed(params, step):
    for i, p in enumerate(params):
        p.grad = random(p.shape, 100 * step + i, p.dtype)


def lone(dtype=torch.bfloat16, value=1.0, lr=1e-3, scale=None):
    """Return one parameter of two numbers, and its optimizer: plain gradient descent."""
    p = nn.Parameter(torch.full((2,), value, dtype=dtype))
    return p, Masters([p], partial(torch.optim.SGD, lr=lr), scale)


# ---- the masters -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_equals_float32_fed_the_cast_gradients(optimizer, dtype):
    ours = parameters(dtype)
    masters = Masters(iter(ours), optimizer)
    plain = [nn.Parameter(p.detach().float()) for p in ours]
    reference = optimizer(plain)
    for step in range(10):
        feed(ours, step)
        for p, q in zip(ours, plain, strict=True):
            q.grad = p.grad.float()
        masters.step()
        reference.step()
        torch.testing.assert_close(masters.masters, plain, rtol=0, atol=0)
        torch.testing.assert_close(ours, [nn.Parameter(q.detach().to(dtype)) for q in plain], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_is_its_own_master(dtype):
    ours, plain = parameters(dtype), parameters(dtype)
    masters, reference = Masters(ours, OPTIMIZERS["adamw"]), OPTIMIZERS["adamw"](plain)
    for step in range(3):
        feed(ours, step)
        feed(plain, step)
        masters.step()
        reference.step()
    torch.testing.assert_close(ours, plain, rtol=0, atol=0)
    assert all(p.data_ptr() == master.data_ptr() for p, master in zip(ours, masters.masters, strict=True))


def test_small_steps_add_up_and_without_masters_are_lost():
    # Below 1.0 bfloat16 has steps of 2**-8; each update is a quarter of one, and rounds away.
    small = 2.0**-10
    p, masters = lone(lr=small)
    bare = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    without = torch.optim.SGD([bare], lr=small)
    for _ in range(64):
        p.grad = bare.grad = torch.ones(2, dtype=torch.bfloat16)
        masters.step()
        without.step()
    assert bare.tolist() == [1.0, 1.0]
    assert p.tolist() == [1 - 64 * small] * 2 == [0.9375, 0.9375]


def test_parameters_without_a_gradient_stay():
    p, q = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    masters = Masters([p, q], partial(torch.optim.AdamW, lr=0.5, weight_decay=0.5))
    p.grad = torch.ones_like(p)
    masters.step()
    assert q.tolist() == [1.0, 1.0]
    assert p[0] < 1
    assert list(masters.state_dict()["state"][1]) == ["master"]


def test_a_frozen_parameter_has_no_master_and_unfreezing_it_is_refused():
    p, q = nn.Parameter(torch.ones(2, dtype=torch.bfloat16)), nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    q.requires_grad_(False)
    masters = Masters([q, p], partial(torch.optim.AdamW, lr=0.5))
    assert [master.shape for master in masters.masters] == [(2,)]
    p.grad = torch.ones_like(p)
    masters.step()
    assert p[0] < 1 and q.tolist() == [1.0, 1.0, 1.0]
    q.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(3,\) was unfrozen after its optimizer was made"):
        masters.step()


def test_a_step_that_failed_leaves_no_gradient_to_the_next():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    masters = Masters([p, q], partial(torch.optim.SGD, lr=1.0))
    p.grad, step = torch.ones_like(p), masters.inner.step
    masters.inner.step = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        masters.step()
    masters.inner.step, p.grad, q.grad = step, None, torch.ones_like(q)
    masters.step()
    assert p.tolist() == [1.0, 1.0] and q.tolist() == [0.0, 0.0]


def test_zero_grad_and_learning_rates():
    p, masters = lone(torch.float32, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(masters.inner, lambda step: 0.5**step)
    for _ in range(3):
        p.grad = torch.ones(2)
        masters.step()
        masters.zero_grad()
        assert p.grad is None
        scheduler.step()
    assert p.tolist() == [1 - 1 - 0.5 - 0.25] * 2
    masters.param_groups[0]["lr"] = 2.0
    p.grad = torch.ones(2)
    masters.step()
    assert p.tolist() == [-2.75] * 2


def test_bytes_are_2_and_2_and_12_and_at_the_peak_one_gradient_more():
    def body():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(8))).bfloat16()
        masters = Masters(model.parameters(), OPTIMIZERS["adamw"])
        for _ in range(3):
            mark("step")
            x = torch.ones(1, 32, dtype=torch.bfloat16)
            mark("backward")
            model(x).sum().backward()
            del x
            mark("optimizer")
            masters.step()
            masters.zero_grad()
        mark("end")

    recording = run(body, ranks=1, record="memory").recording
    each, size = 32 * 32, 8 * 32 * 32
    held = recording.steady(0)
    counters = 8 * 4
    assert (held["P"], held["S"]) == (2 * size, 12 * size + counters)
    # The gradients, and the copy of one of them in float32; torch's AdamW works in two temporaries of its size.
    assert held["G"] == 2 * size + 4 * each
    assert held["peak"] <= 16 * size + counters + 4 * each + 2 * 4 * each + 1024


# ---- state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_with_its_state_a_training_continues_as_if_never_stopped(optimizer, tmp_path):
    straight, stopped = parameters(torch.bfloat16), parameters(torch.bfloat16)
    through, first = Masters(straight, optimizer), Masters(stopped, optimizer)
    for step in range(3):
        feed(straight, step)
        feed(stopped, step)
        through.step()
        first.step()
    torch.save(first.state_dict(), tmp_path / "state.pt")
    resumed = [nn.Parameter(torch.zeros_like(p)) for p in stopped]  # the state has the parameters, too
    second = Masters(resumed, optimizer)
    second.load_state_dict(torch.load(tmp_path / "state.pt"))
    torch.testing.assert_close(resumed, stopped, rtol=0, atol=0)
    for step in range(3, 6):
        feed(straight, step)
        feed(resumed, step)
        through.step()
        second.step()
    torch.testing.assert_close(second.state_dict(), through.state_dict(), rtol=0, atol=0)
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)


def test_state_has_torchs_own_format():
    ours, plain = parameters(torch.bfloat16), [p.detach().float() for p in parameters(torch.bfloat16)]
    masters, reference = Masters(ours, OPTIMIZERS["adamw"]), OPTIMIZERS["adamw"](plain)
    for params in (ours, plain):
        feed(params, 0)
    masters.step()
    reference.step()
    mine, theirs = masters.state_dict(), reference.state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for i, p in enumerate(plain):
        assert set(mine["state"][i]) == {"master", *theirs["state"][i]}
        assert mine["state"][i]["master"].shape == p.shape


def test_a_state_that_does_not_fit_is_refused_before_anything_changes():
    p, masters = lone()
    plain = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1e-3)
    with pytest.raises(ValueError, match=r"the master of parameter 0, of shape \(2,\), is missing: load what Masters"):
        masters.load_state_dict(plain.state_dict())
    other = Masters([nn.Parameter(torch.ones(1).bfloat16())], partial(torch.optim.SGD, lr=1.0))
    with pytest.raises(ValueError, match=r"of shape \(2,\), has the shape \(1,\)"):
        masters.load_state_dict(other.state_dict())
    assert p.tolist() == [1.0, 1.0]
    assert masters.param_groups[0]["lr"] == 1e-3


@pytest.mark.parametrize("wrong, what", [([{"params": []}], "dict"), ([torch.ones(2, dtype=torch.int64)], "int64")])
def test_an_argument_that_is_not_a_parameter_is_named(wrong, what):
    with pytest.raises(TypeError, match=f"a list of floating-point parameters; one of these is .*{what}"):
        Masters(wrong, OPTIMIZERS["sgd"])


# ---- several ranks ---------------------------------------------------------------------------------------

CONFIG = Config(vocab=17, dim=12, depth=2, heads=2, kv_heads=1, hidden=20, context=6)
STEPS = 10


def build(dtype=torch.bfloat16):
    return GPT(CONFIG).to(dtype)


def batch(step, rank):
    tokens = torch.randint(17, (3, 7), generator=torch.Generator().manual_seed(10 * step + rank))
    return tokens[:, :-1], tokens[:, 1:]


@cache
def one_process(ranks, max_norm=None):
    """Train in one process in the same precision: each rank's gradient alone, added in the order of the ranks,
    divided.
    """
    return run(by_itself, ranks, max_norm, ranks=1)[0]


def by_itself(ranks, max_norm):
    model = build()
    clip = max_norm and (lambda trained: clip_gradients(trained, max_norm))
    optimizer = Masters(model.parameters(), OPTIMIZERS["adamw"])
    trained_alone(model, optimizer, lambda *at: model(*batch(*at)), ranks, STEPS, clip=clip)
    return {name: p.detach() for name, p in model.named_parameters()}


def with_ddp():
    model = ddp.Overlapped(build())
    optimizer = Masters(model.parameters(), OPTIMIZERS["adamw"])
    for step in range(STEPS):
        model(*batch(step, dist.get_rank())).backward()
        model.sync()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.module.named_parameters()}


def with_zero(stage, max_norm=None):
    model = build()
    zero = Zero(model, stage, partial(Masters, optimizer=OPTIMIZERS["adamw"]))
    for step in range(STEPS):
        model(*batch(step, dist.get_rank())).backward()
        zero.sync()
        if max_norm:
            clip_gradients(zero.shards, max_norm, groups=(None,))
        zero.step()
    return zero.full_state_dict()


def test_with_ddp():
    # Two ranks can add two numbers in only one way; on more ranks, the ring's order rounds differently.
    for result in run(with_ddp, ranks=2):
        torch.testing.assert_close(result, one_process(2), rtol=0, atol=0)


@pytest.mark.parametrize("ranks", [3, *deepen(2, 4)])
def test_with_zero(ranks):
    def body():
        return [with_zero(stage) for stage in (1, 2, 3)]

    for results in run(body, ranks=ranks):
        for result in results:
            torch.testing.assert_close(result, one_process(ranks), rtol=0, atol=0)


def test_clipped_with_zero():
    # The norm is added up in other pieces, and rounds differently: an element halfway between two numbers of bfloat16
    # may round to the other one.
    for results in run(lambda: [with_zero(stage, 0.5) for stage in (1, 2, 3)], ranks=3):
        for result in results:
            torch.testing.assert_close(result, one_process(3, 0.5), rtol=2**-7, atol=1e-3)


# ---- the loss scale --------------------------------------------------------------------------------------


def test_a_gradient_too_small_for_float16_is_saved_by_the_scale():
    def trained(scale):
        p, masters = lone(torch.float16, lr=1e6, scale=scale)
        loss = (p.sum() * 1e-5).float() * 1e-3  # d loss / d p = 1e-8; float16 ends at 6e-8
        (scale(loss) if scale else loss).backward()
        masters.step()
        return masters.masters[0].tolist()

    assert trained(None) == [1.0, 1.0]
    assert trained(LossScale(2.0**12, groups=())) == pytest.approx([0.99, 0.99], rel=1e-3)


def test_the_scale_cancels_exactly():
    # A power of two changes no digit of a number in range.
    plain, scaled = parameters(torch.bfloat16), parameters(torch.bfloat16)
    scale = LossScale(groups=())
    one, other = Masters(plain, OPTIMIZERS["adamw"]), Masters(scaled, OPTIMIZERS["adamw"], scale)
    for step in range(3):
        feed(plain, step)
        feed(scaled, step)
        for p in scaled:
            p.grad *= scale.value
        one.step()
        other.step()
    torch.testing.assert_close(other.masters, one.masters, rtol=0, atol=0)


def test_the_scale_grows_and_backs_off():
    scale = LossScale(8.0, interval=3, groups=())
    p, masters = lone(torch.float16, scale=scale)
    values = []
    for step in range(9):
        p.grad = torch.full((2,), float("inf") if step in (1, 2) else 1.0).half()
        before = masters.masters[0].tolist()
        masters.step()
        assert (masters.masters[0].tolist() == before) == (step in (1, 2))
        values.append(scale.value)
    assert values == [8, 4, 2, 2, 2, 4, 4, 4, 8]


def test_the_step_uses_the_scale_that_its_loss_had():
    scale = LossScale(4.0, interval=1, groups=())
    p, masters = lone(torch.float32, lr=1.0, scale=scale)
    for expected in (0.0, -1.0, -2.0):
        scale((p * 1.0).sum()).backward()
        masters.step()
        masters.zero_grad()
        assert p.tolist() == [expected] * 2
    assert scale.value == 32.0


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_one_ranks_overflow_stops_all(value):
    def body():
        scale = LossScale(64.0, interval=2)
        p, masters = lone(torch.float16, lr=1.0, scale=scale)  # p is this rank's shard
        history = []
        for step in range(4):
            p.grad = torch.ones(2).half() * scale.value
            if step == 1 and dist.get_rank() == 2:
                p.grad[1] = value
            masters.step()
            history.append((p.tolist(), scale.value))
        return history

    after = [([0.0, 0.0], 64.0), ([0.0, 0.0], 32.0), ([-1.0, -1.0], 32.0), ([-2.0, -2.0], 64.0)]
    assert run(body, ranks=3) == [after] * 3


def test_float16_with_zero_overflows_in_the_sum_and_recovers():
    """Begin with a scale that is too large: some step must be skipped, on all ranks, and training continues."""

    def body(stage):
        scale = LossScale(2.0**24)
        model = build(torch.float16)
        zero = Zero(model, stage, partial(Masters, optimizer=OPTIMIZERS["adamw"], loss_scale=scale))
        values, losses = [], []
        for _ in range(30):
            loss = model(*batch(0, dist.get_rank()))
            scale(loss).backward()
            zero.step()
            values.append(scale.value)
            losses.append(loss.item())
        return values, losses, zero.full_state_dict()

    for stage in (1, 2, 3):
        (values, losses, state), (others, _, same) = run(body, stage, ranks=2)
        assert values == others
        assert values[0] == 2.0**23 and values[-1] < 2.0**23
        torch.testing.assert_close(state, same, rtol=0, atol=0)
        assert losses[0] == losses[1], "the first step was to be skipped"
        assert losses[-1] < losses[0] - 0.5


def test_clipping_under_a_scale_is_clipping_to_as_much_more():
    plain, scaled = parameters(torch.float32), parameters(torch.float32)
    scale = LossScale(1024.0, groups=())
    one, other = Masters(plain, OPTIMIZERS["sgd"]), Masters(scaled, OPTIMIZERS["sgd"], scale)
    feed(plain, 0)
    feed(scaled, 0)
    for p in scaled:
        p.grad *= scale.value
    norm = clip_gradients(plain, 0.5)
    assert clip_gradients(scaled, 0.5 * scale.value) / scale.value == norm
    one.step()
    other.step()
    torch.testing.assert_close(scaled, plain, rtol=1e-6, atol=0)


def test_a_rank_without_gradients_is_asked_too():
    def body():
        scale = LossScale(8.0)
        p, masters = lone(torch.float16, scale=scale)
        if dist.get_rank() == 0:
            p.grad = torch.full((2,), float("nan")).half()
        masters.step()
        return p.tolist(), scale.value

    assert run(body, ranks=2) == [([1.0, 1.0], 4.0)] * 2


def test_a_state_of_the_scale():
    scale = LossScale(8.0, interval=3, groups=())
    scale.grow()
    again = LossScale(interval=3, groups=())
    again.load_state_dict(scale.state_dict())
    for s in (scale, again):
        s.grow()
        s.grow()
    assert again.value == scale.value == 16.0


def test_gradients_that_no_scale_helps_are_reported():
    scale = LossScale(1.0, groups=())
    p, masters = lone(torch.float16, scale=scale)
    p.grad = torch.full((2,), float("nan")).half()
    with pytest.raises(FloatingPointError, match=r"overflow although .* look for inf or nan in the loss itself"):
        for _ in range(20):
            masters.step()
    assert p.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("value", [0.0, -2.0, float("inf"), float("nan")])
def test_an_impossible_scale_is_refused(value):
    with pytest.raises(ValueError, match=f"value is {value}: begin with a factor above"):
        LossScale(value)


def test_an_impossible_interval_is_refused():
    with pytest.raises(ValueError, match="interval is 0: the factor can grow after 1 step at the soonest"):
        LossScale(interval=0)
