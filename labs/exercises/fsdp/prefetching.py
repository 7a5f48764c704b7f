"""prefetching: hooks gather the next layer while a layer computes, in forward and backward; a third is never gathered.

`labs.fsdp` shards the layers of a model, and gathers each only when it is needed.  The model is trained for a step,
evaluated, and trained again.  Each rank records in order: the start of a layer's gather, the wait for it, and the
layer's forward and backward.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.exercises.engine.answer import Mistake, answered, first, says
from labs.exercises.engine.by_script import Play, checked, on_each_rank, wrong
from labs.exercises.engine.on_ranks import F64, Draw
from labs.exercises.engine.scripts import Look, StepOutcomes, World
from labs.fsdp import fully_shard
from labs.fsdp.module_events import Sharding
from labs.kit.watch import c10d_tap
from labs.mesh import Mesh

DIM = 4
USES = "forward", "backward"
ONCE, TRAINED = "right only where no layer comes twice", "right only where no layer is frozen"


@dataclass(frozen=True)
class Chain(World):
    """A world with a chain of layers.

    there: the numbers of the layers in the order of forward; a layer may be used more than once.
    frozen: the number of a frozen layer.
    """

    there: tuple[int, ...] = ()
    frozen: int | None = None

    def model(self, notes: list[Any]) -> nn.Sequential:
        generator = self.generator()
        widths = torch.randperm(6, generator=generator) + 3  # no two layers have the same size
        layers = [ChainedLayer(number, int(widths[number]), notes) for number in range(max(self.there) + 1)]
        model = nn.Sequential(*(layers[number] for number in self.there)).double()
        for p in model.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=F64)
        if self.frozen is not None:
            layers[self.frozen].requires_grad_(False)
        return model

    def batch(self, rank: int) -> Tensor:
        x_BD = torch.randn(3, DIM, generator=self.generator(rank, 1 + self.step), dtype=F64)
        return x_BD.requires_grad_()  # otherwise PyTorch warns about a hook on the first layer's backward

    @property
    def trains(self) -> bool:
        return self.step != 1

    def expected(self) -> list[dict[str, Tensor | None]]:
        model, losses = self.model([]), []
        for rank in self.members:
            losses.append(model(self.batch(rank)).square().mean())
        if self.trains:
            (sum(losses) / self.n).backward()
        gradients = {f"the gradient of {name}": p.grad for name, p in model.named_parameters()}
        return [{"the loss": loss.detach()} | gradients for loss in losses]

    def __str__(self) -> str:
        return f"{self.who}, layers {', '.join(map(str, self.there))}"


class ChainedLayer(nn.Module):
    def __init__(self, number: int, width: int, notes: list[Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, width), nn.Linear(width, DIM)
        self.note = lambda what: notes.append((what, number))

    def forward(self, x_BD: Tensor) -> Tensor:
        self.note("forward")
        y_BD = torch.tanh(self.down(torch.tanh(self.up(x_BD))))
        if y_BD.requires_grad:
            y_BD.register_hook(lambda _: self.note("backward"))
        return x_BD + y_BD  # a new tensor: all hooks on it are called before the one on y_BD


def sharding(layer: Any) -> Sharding:
    return layer._sharding


class Gathers(c10d_tap.Listener):
    """A record of the gathers while it is entered, each by its layer, and of the most layers gathered or in flight."""

    def __init__(self, layers: dict[int, Any], notes: list[Any]) -> None:
        self.groups, self.notes, self.most = [sharding(layer).group for layer in layers.values()], notes, 0
        self.numbers = {g.width * g.ranks * F64.itemsize: n for n, g in zip(layers, self.groups, strict=True)}

    @property
    def held(self) -> int:
        """The number of layers whose parameters are gathered or in flight."""
        return sum(group.gathered or group.arriving is not None for group in self.groups)

    def issued(self, call: c10d_tap.IssuedCall) -> None:
        if (
            call.op == "all_gather" and call.outputs[0].dtype is F64
        ):  # gathers of other dtypes compare values between ranks
            call.notes[self] = self.numbers[call.outputs[0].nbytes]
            self.notes.append(("gather", call.notes[self]))
            self.most = max(self.most, 1 + self.held)

    def waiting(self, call: c10d_tap.IssuedCall) -> None:
        if self in call.notes:
            self.notes.append(("wait", call.notes[self]))


def whole(p: nn.Parameter) -> Tensor | None:
    return None if p.grad is None else p.grad.full_tensor()


def steps(world: Chain, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Play the steps of training: yield before each, and then a look with loss, gradients and recorded gathers."""
    notes: list[Any] = []
    model, mesh = world.model(notes), Mesh((world.n,), ("dp",))
    layers = dict(zip(world.there, model, strict=True))
    for layer in layers.values():
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        layer.set_modules_to_forward_prefetch([])
        layer.set_modules_to_backward_prefetch([])
    fully_shard(model, mesh=mesh)
    for step in range(world.steps):
        now = world.at(step)
        yield None
        if not step:
            fn(model)
        model.train(now.trains).zero_grad()
        with Gathers(layers, notes) as gathers, torch.set_grad_enabled(now.trains):
            notes.clear()
            loss = model(now.batch(dist.get_rank())).square().mean()
            if now.trains:
                loss.backward()
        ahead = [(each.next_in_forward, each.next_in_backward) for each in gathers.groups]
        facts = {"notes": list(notes), "most": gathers.most, "own": any(each != ([], []) for each in ahead)}
        gradients = {f"the gradient of {name}": whole(p) for name, p in model.named_parameters()}
        yield Look({"the loss": loss.detach()} | gradients, facts)


class PrefetchedStep:
    """The gathers, waits and uses of layers in one step on one rank.

    uses: (forward or backward, layer), in the expected order.
    gathers, waits: (layer, the number of uses that had begun).
    ahead: the places of the uses that can be gathered ahead: all but the first of forward and the first of backward.
    """

    def __init__(self, world: Chain, notes: list[Any], most: int, own: bool) -> None:
        self.most, self.own, self.layers, self.depth = most, own, len(set(world.there)), len(world.there)
        self.uses = [("forward", n) for n in world.there] + [("backward", n) for n in world.there[::-1]] * world.trains
        self.ahead = [k for k in range(len(self.uses)) if k not in (0, self.depth)]
        begun = [0, *accumulate(what in USES for what, _ in notes)]
        self.gathers, self.waits = (
            [(n, at) for (what, n), at in zip(notes, begun, strict=False) if what == kind]
            for kind in ("gather", "wait")
        )

    def by_use(self, calls: list[tuple[int, int]]) -> dict[int, int]:
        """Return {place of a layer's use: the number of uses that had begun when the layer was gathered or waited for}.

        The first call that is in another order than the uses, and all calls after it, are left out.
        """
        left = list(calls)
        return {k: left.pop(0)[1] for k, (_, n) in enumerate(self.uses) if left and left[0][0] == n}

    @property
    def late(self) -> list[int]:
        """The places of the layers' uses that were not gathered ahead."""
        begun = self.by_use(self.gathers)
        return [k for k in self.ahead if begun.get(k, 0) >= k]

    def describe(self, k: int, words: str) -> str:
        (what, number), (_, before) = self.uses[k], self.uses[k - 1]
        return f"in {what}, layer {number} was {words} layer {before} computed"


def step_of(seen: StepOutcomes) -> Iterator[tuple[str, PrefetchedStep]]:
    for where, done in on_each_rank(seen):
        yield where, PrefetchedStep(seen.world, **done.facts)


def after_its_backward(step: PrefetchedStep) -> str | None:
    """Return a sentence about a layer that was gathered again after its backward, or None."""
    gathers = ((n, step.uses[:at], step.uses[at:]) for n, at in step.gathers if at < len(step.uses) - 1)
    again = (n for n, past, coming in gathers if ("backward", n) in past and ("backward", n) not in coming)
    return first(f"layer {n} was gathered once more when its backward was over" for n in again)


def waited_early(step: PrefetchedStep) -> str | None:
    """Return a sentence about a layer that was waited for too early, or None."""
    begun = step.by_use(step.waits)
    return first(step.describe(k, "waited for before") for k in step.ahead if begun.get(k, k) < k)


def late(step: PrefetchedStep) -> str | bool:
    return bool(step.late) and step.describe(step.late[0], "not on its way before")


# fmt: off
NOW = "Which layer must be here now, and which one may still be on its way?"
TWICE = "How does your hook know which use of the layer this is, and are its hooks registered once?"
RETURNS = "What becomes of what a hook returns?"
RAISED = (
    Mistake("a hook returns something", RETURNS,
            says(r"\bSharding(?!' object has no attribute)|expected Variable|hook '.*' has changed|"
                 "has returned an incorrect number")),
    Mistake(ONCE, TWICE, says(r"layers .*\b(\d), .*\b\1\b")),
)
STEP = (
    Mistake("it is not your hooks that gather ahead",
            "Whom does PyTorch call when a layer's forward or backward begins?",
            lambda step: step.own and "fully_shard was told what to gather ahead"),
    Mistake("backward goes in forward's order", "Which layer computes after this one, on the way back?",
            after_its_backward),
    Mistake("every layer is held",
            "At the last layer's turn, what of the first one is still here? Then what has sharding saved?",
            lambda step: step.most == step.layers > 3 and f"{step.most} layers were here or on their way",
            symptom="quick, but the peak is the whole model's"),
    Mistake("three layers at a time", NOW,
            lambda step: step.most > 2 and f"{step.most} layers were here or on their way"),
    Mistake("gathered in vain", "Who uses what comes after the last layer?",
            lambda step: len(step.gathers) > len(step.uses)
            and f"{len(step.gathers)} gathers, for {len(step.uses)} times that a layer computes"),
    Mistake("the later one is gathered first",
            "Whose hook is called first, yours or fully_shard's? And which of two layers is needed first?",
            lambda step: len(step.by_use(step.gathers)) < len(step.gathers)
            and f"layers were gathered in the order {', '.join(str(n) for n, _ in step.gathers)}",
            symptom="backward begins with a wait that is as long as two gathers"),
    Mistake("waited for before it is needed",
            "What could this rank compute, instead of standing still for the next layer?", waited_early,
            symptom="gathers begin early, but the waiting is as long as without prefetch"),
    Mistake("nothing is on its way while a layer computes", NOW,
            lambda step: step.late == step.ahead and late(step),
            symptom="a comb of waiting in the timeline"),
    Mistake("some gathers come late", NOW, late),
)
# fmt: on
PLAY = Play(
    lambda draw: {2: list(two_ranks(draw)), 4: [chain(draw, 4, *range(5)), chain(draw, 4, 0, 1, 0)]},
    steps,
    tables=(
        (step_of, STEP),
        (wrong(Chain.expected, {F64: 1e-10}), (Mistake("other numbers", RETURNS, lambda one: True),)),
    ),
    question=NOW,
    raised=RAISED,
    questions={ONCE: TWICE, TRAINED: "Who needs a frozen layer's weights in backward?"},
)


def chain(draw: Draw, ranks: int, *there: int, **options: Any) -> Chain:
    only = ONCE if len(set(there)) < len(there) else TRAINED if "frozen" in options else ""
    return draw.world(Chain, ranks, there=there, steps=3, only=only, **options)


def two_ranks(draw: Draw) -> Iterator[Chain]:
    yield chain(draw, 2, *range(4))
    yield chain(draw, 2, *range(draw.random.randrange(5, 7)), frozen=draw.random.randrange(1, 5))
    yield from (chain(draw, 2, *there) for there in ((0,), (0, 1), (0, 1, 2, 0)))


@answered
def prefetching(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(model)`: it adds hooks to an nn.Sequential of sharded layers, each gathered only when it is needed.

    layer.unshard(async_op=True) starts a layer's gather, unless it is gathered or in flight, and returns at once.
    """
    seen = checked(PLAY, (fn,), seed).seen
    most = max(step.most for each in seen for _, step in step_of(each))
    return (
        "there and back, each layer but the first was on its way while the one before it computed; each was gathered "
        f"once for each time, and at most {most} were held"
    )
