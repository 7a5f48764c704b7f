"""gradient_ready, stage 2: a gradient is reduced to its owners as soon as it is complete, and is then dropped."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.by_script import Play, as_a_whole, budgeted, each_after, on_each_rank, wrong
from labs.exercises.engine.on_ranks import BF16, F32, Draw
from labs.exercises.engine.scripts import Look, StepOutcomes
from labs.exercises.zero import _pieces as pieces
from labs.exercises.zero._flat_layers import LAYERS, SETTLED, TOLERANCE, Layers, draw_layers, means, thaw, wide


def worlds(draw: Draw) -> dict[int, list[Layers]]:
    case = partial(draw_layers, draw, Layers)
    return {
        3: [case(3), case(3, micro_batches=3, tied=True)],
        2: [case(2, micro_batches=2), case(2, dtype=F32, frozen=True)],
        4: [case(4, micro_batches=2, frozen=True), case(4, dtype=BF16), case(4, tied=True, idle=True, alike=True)],
    }


def scatter(world: Layers, fn: Callable[..., Any]) -> Iterator[Look | None]:
    """Register a hook at each layer's vector and run the backwards: yield before each step, and then a look."""
    rank, fulls, calls = dist.get_rank(), world.parameters(), []
    pieces_of = {name: full.data.chunk(world.n)[rank] for name, full in world.named(fulls).items()}
    shards = nn.ParameterDict({name: nn.Parameter(piece) for name, piece in pieces_of.items()})

    def ready(name: str, full: nn.Parameter) -> None:
        shard = shards[name]
        fn(full, shard)
        state = {"of": name, "whole": size_of(full.grad), "own": size_of(shard.grad), "thawed": thaw(full)}
        calls.append(state)
        full.grad = None
        if world.held:
            time.sleep(SETTLED)

    for name, full in world.named(fulls).items():
        full.register_post_accumulate_grad_hook(partial(ready, name))
    for step in range(world.steps):
        for full, vector in zip(fulls, world.vectors(step), strict=True):
            full.data.copy_(vector)
        for shard in shards.values():
            # Odd steps begin with a gradient of zeros, as after zero_grad(set_to_none=False).
            shard.grad = torch.zeros_like(shard) if step % 2 and not world.held else None
        calls.clear()
        yield None
        world.backwards(fulls, rank, step)
        changed = not world.held and not all(map(torch.equal, fulls, world.vectors(step)))
        facts = {"gradient_ready": list(calls), "changed": changed}
        yield Look({name: shard.grad for name, shard in shards.items()}, facts)


def size_of(gradient: Tensor | None) -> int | None:
    """Return the number of elements of a gradient, or None if there is no gradient."""
    return None if gradient is None else gradient.numel()


def gradients(world: Layers) -> list[list[Tensor]]:
    return world.plain(world.vectors(world.step), world.step)


def expected(world: Layers) -> list[dict[str, Tensor]]:
    named = list(zip(world.trained, means(gradients(world)), strict=True))
    return [{f"layer {i}": mean.chunk(world.n)[rank] for i, mean in named} for rank in world.members]


def followed(seen: StepOutcomes) -> Iterator[tuple[str, pieces.Followed]]:
    """Yield, for each wrong gradient, all gradients that its rank received, as a Followed."""
    for where, one in wrong(expected, TOLERANCE)(seen):
        found = torch.cat([*one.done.values.values()])
        yield where, pieces.Followed(seen.world, one.index, found, gradients(seen.world))


# fmt: off
THERE = ("In this step shard.grad is there before the first gradient comes, and holds zeros. What do you make of the "
         "two?")
CALL = (
    Mistake("the whole gradient is kept", "Who needs the whole gradient, once its shard has been reduced?",
            lambda call: call.whole is not None and f"full.grad still holds {call.whole} elements"),
    Mistake("the shard has no gradient", "Where will the optimizer look?",
            lambda call: call.own is None and "shard.grad is None"),
    pieces.THAWED,
)
PLAY = Play(
    worlds,
    scatter,
    tables=(
        (each_after("gradient_ready"), CALL),
        (on_each_rank, (
            Mistake("the parameters have changed",
                    "Which of the four may change here: full, full.grad, shard, shard.grad?",
                    lambda done: done.facts["changed"] and "the parameters themselves have, before the optimizer"),
        )),
        (as_a_whole, rows.LUCK),
        (followed, (
            Mistake("overwritten instead of added",
                    "The gradients of two micro-batches: which of them does the optimizer need?",
                    lambda one: one.called == "only the last micro-batch counts" and one.description),
            Mistake("a moving average", THERE,
                    lambda one: one.world.step % 2 and one.called == "divided by the wrong number" and one.description),
            *pieces.GRADIENT,
        )),
        (budgeted(lambda world: pieces.travel(world, *[world.gradients * world.micro_batches] * 2)), rows.SENT),
    ),
    question="Which gradients went into this one, and how often?",
    questions=pieces.QUESTIONS,
    memory=rows.Memory(
        wide(Layers, micro_batches=2, steps=3),
        during=LAYERS / 4 + pieces.BUFFERS,
        after=LAYERS / 4 + pieces.SLACK,
        mistakes=pieces.held(
            ("the whole gradient is kept elsewhere", "Which of your variables still refers to the whole gradient?"),
            ("freed only at the end of backward", "How many layers' gradients are there when the last one comes?"),
        ),
    ),
)
# fmt: on


@answered
def gradient_ready(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(full, shard)`, which is called whenever `full.grad` is complete.

    It adds the shard of the mean gradient to `shard.grad`, and drops `full.grad`.
    full [n], shard [n / N]: nn.Parameters; shard.grad is None, or the sum over the micro-batches so far.
    """
    passed = pieces.checked(PLAY, (fn,), seed)
    last = passed.seen[-1]
    sent = last.sent[0] / (last.world.gradients * last.world.micro_batches)
    return (
        f"besides the layer in flight you held {passed.rest / LAYERS:.2f} × the gradients, and sent {sent:.2f} × the "
        "gradients per rank and micro-batch; the least possible is 0.25 × and 0.75 ×"
    )
