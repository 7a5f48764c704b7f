"""obey: a function that does F and B on a rank, whatever the list, in the executor's place, on 1, 2 and 4 ranks.

Each tensor must be taken and put once, on the rank and at the time that the list says, and be what its reader needs.
The function may change, or hold, nothing else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from labs import pp
from labs.exercises.engine.answer import Mistake, Wrong, answered, says, show
from labs.exercises.engine.around_a_call import AFTERMATH
from labs.exercises.engine.by_script import Play, checked, on_each_rank
from labs.exercises.engine.on_ranks import BF16, F64, Draw
from labs.exercises.engine.scripts import Look, StepOutcomes
from labs.exercises.engine.value import One, all_are
from labs.exercises.pipeline._desk import Desk
from labs.exercises.pipeline._stages_run_by_lists import (
    TOLERANCE,
    Stacked,
    bits,
    by_itself,
    flat,
    mean_loss,
    total,
    whole,
)

OWN_ORDERS = "0F2 0F0 0F3 0F1 0B1 0B0 0B2 0B3", "1F1 1F3 1F2 1F0 1B3 1B0 1B1 1B2"
STEPPED, WITH_GRAPH = "a parameter", "one with its graph"


def worlds(draw: Draw) -> dict[int, list[Stacked]]:
    def world(ranks: int, name: str, lists: pp.Lists, **options: Any) -> Stacked:
        return draw.world(Stacked, ranks, name=name, lists=tuple(map(tuple, lists)), steps=2, **options)

    shuffled = [[type(x)(x.stage, (3, 0, 4, 2, 1)[x.microbatch]) for x in each] for each in pp.one_f_one_b(2, 5)]
    return {
        2: [
            world(2, "1F1B", pp.one_f_one_b(2, 5)),
            world(2, "GPipe, each rank in an order of its own", [map(pp.read, x.split()) for x in OWN_ORDERS]),
            world(2, "1F1B, the micro-batches in another order", shuffled),
            world(2, "a V", whole(pp.zbv(2, 5))),
            world(2, "1F1B of floats", pp.one_f_one_b(2, 3), floats=True),
            world(2, "one rank", pp.one_f_one_b(1, 3), group=(0,)),
        ],
        4: [
            world(4, "1F1B", pp.one_f_one_b(4, 6)),
            world(4, "1F1B, some parameters frozen", pp.one_f_one_b(4, 2), frozen=True),
            world(4, "GPipe in bfloat16", pp.gpipe(4, 1), dtype=BF16),
            world(4, "interleaved", pp.interleaved(4, 8)),
            world(4, "a V", whole(pp.zbv(4, 6))),
        ],
    }


ONLY = {  # names for an error that is raised only in such worlds
    "order": "right only where micro-batches come in their order",
    "a V|interleaved": "right only with one stage per rank",
    "1F1B of floats": "right only where tokens come in",
    "one rank": "right only on more than one rank",
    "1F1B, some": "right only where all parameters are trained",
    "GPipe in bfloat16": "right only in float64",
}


def batches(world: Stacked, fn: Callable[..., Any]) -> Iterator[Look | None]:
    me, model = world.index(), world.model()
    mine = {number: model[number] for number in sorted({x.stage for x in world.lists[me]})}
    for now in map(world.at, range(world.steps)):
        order, (xs, ys), has_last = list(world.lists[me]), now.batch(), world.stages - 1 in mine
        given = order, mine, xs if 0 in mine else [], ys if has_last else []
        summands = {f"stage {number}": now.summands(number) for number in mine}
        expected = torch.tensor([loss for loss, _ in by_itself(now)], dtype=F64) if has_last else None
        before, desk = condition(*given), Desk(world, me, mine)
        yield None
        with saved_tensors_hooks(desk.pack, lambda box: box.tensor):
            losses = fn(order, mine, mean_loss, *given[2:], desk.take, desk.put)
        desk.finish()
        found = in_one(losses)
        del losses
        facts = {
            "kept": desk.left(),
            "stale": desk.stale,
            "retained": desk.retained,
            "losses": expected,
            "summands": summands,
        }
        after = condition(*given)
        facts["changed"] = next((name for name, value in before.items() if value != after[name]), "")
        yield Look({"losses": found} | {f"stage {number}": flat(stage) for number, stage in mine.items()}, facts)


def condition(order: Sequence[Any], stages: dict[int, Any], xs: list[Tensor], ys: list[Tensor]) -> dict[str, Any]:
    """Return everything that the learner's `obey` must leave unchanged, as `{name: value}`."""
    modules = [module for stage in stages.values() for module in stage.modules()]
    parameters = [p for stage in stages.values() for p in stage.parameters()]
    return {
        STEPPED: [p.tolist() for p in parameters],
        "the list of instructions": list(order),
        "the dict of stages": dict(stages),
        "xs or ys": [[x.tolist() for x in each] for each in (xs, ys)],
        "whether xs need a gradient": [x.requires_grad for x in xs],
        "the training mode of a stage": [module.training for module in modules],
        "which parameters are trained": [p.requires_grad for p in parameters],
        "the gradient of a frozen parameter": [p.grad is None for p in parameters if not p.requires_grad],
        "the number of hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules],
    }


def in_one(losses: Any) -> Tensor | str | None:
    """Return losses in one tensor, if they have no dims and no graph; describe any other result in a few words.

    The result is None if there are no losses.
    """
    losses = list(losses) if isinstance(losses, Tensor) and losses.ndim else losses
    if not isinstance(losses, Sequence):
        return show(losses)
    if all(isinstance(x, Tensor) and not x.ndim and not x.requires_grad for x in losses):
        return torch.stack(list(losses)).to(F64) if losses else None
    words = [WITH_GRAPH if isinstance(x, Tensor) and x.requires_grad and not x.ndim else show(x) for x in losses]
    return f"[{', '.join(words)}]"


def ones(seen: StepOutcomes) -> Iterator[One]:
    """Yield the gradients of each stage, in backward's order: from the last stage on."""
    of_all = [(name, index) for index, done in enumerate(seen.done) for name in done.facts["summands"]]
    for name, index in sorted(of_all, reverse=True):
        summands = seen.done[index].facts["summands"][name]
        expected_by_name = [{name: total(summands)}] * seen.world.n
        yield One(seen, index, name, expected_by_name, TOLERANCE[seen.world.dtype], summands)


def gradients(seen: StepOutcomes) -> Iterator[tuple[str, One]]:
    """Yield the wrong gradients of stages, each with a sentence that names the stage and the rank."""
    for one in ones(seen):
        if not one.right:
            yield f"on rank {one.rank} in {one.name}'s gradients {one.first}\n", one


def losses(seen: StepOutcomes) -> Iterator[tuple[str, One]]:
    """Yield the losses that are wrong, each with a sentence; those of the rank that computes losses come first."""
    expected_by_name = [{"losses": done.facts["losses"]} for done in seen.done]
    for index in sorted(range(seen.world.n), key=lambda index: expected_by_name[index]["losses"] is None):
        one = One(seen, index, "losses", expected_by_name, 1e-5)
        if not one.right:
            yield (
                f"on rank {one.rank} the losses are {shown(one.received)}; they should be {shown(one.expected)}\n",
                one,
            )


def shown(losses: Tensor | str | None) -> str:
    return str([round(x, 4) for x in losses.tolist()]) if isinstance(losses, Tensor) else losses or "[]"


def made(matches: Callable[[Tensor, int], Any]) -> Callable[[One], str | None]:
    """Return a row's test on how often each micro-batch's gradient is in the sum.

    matches: is called with these times, in the order of the backwards, and with the number of micro-batches in a batch
    """

    def in_words(one: One) -> str | None:
        if one.times is None or not matches(one.times, one.world.microbatches):
            return None
        times = ", ".join(f"{c:.3g}" for c in one.times.tolist())
        return f"It has [{times}] times what is due of the micro-batches until now."

    return in_words


def only_the_last(times: Tensor, m: int) -> bool:
    c = times.round(decimals=3).tolist()
    return 0 in c and set(c) <= {0, 1} and c == sorted(c)


def other_losses(one: One) -> str | None:
    """Return a sentence if the losses on the same rank are wrong, too."""
    wrong = ((words, other) for words, other in losses(one.seen) if other.index == one.index)
    return next(
        (words for words, other in wrong if isinstance(other.received, Tensor) and other.expected is not None), None
    )


KEEP = "What must a rank keep from a micro-batch's forward until its backward, and what not?"
COUNT = "The batch's loss is the mean over how many micro-batches, and who divides by that?"
# fmt: off
RAISED = (
    Mistake("part of the list is not done", "How often does your loop run, and for which instructions does it do "
            "nothing?", says("was not done")),
    Mistake("not in the order of the list", "Who decides what comes next: the list, or your function?",
            says("which the list has first"), symptom="right numbers, but GPipe's memory whatever the schedule"),
    Mistake("no gradient to put",
            "Backward leaves one in the .grad of what its graph begins with. Is that what you took, and what you read?",
            says("there is no gradient|One of the differentiated Tensors does not require grad")),
    Mistake("not put", "Who waits for it?", says("was never put"), symptom="a stage that waits for ever"),
    Mistake("put for nobody", "Which stage would take it? What nobody takes stays for ever.", says("nobody waits")),
    Mistake("put with its graph", "What of it does another rank need?", says("a tensor that requires a gradient")),
    Mistake("changed after it was put",
            "A message may wait before it leaves, and does not copy what is in it. Who still writes there?",
            says("was changed afterwards"),
            symptom="a gradient that is right on most days: it is overwritten before it has left"),
    Mistake("put under the wrong name", "What has this instruction made, and under which name?",
            says("not in this rank's")),
    Mistake("put twice", "How often does a neighbour take it?", says(r"put\(.*for the second time")),
    Mistake("something else is taken",
            "Which instruction makes what this one needs: of which stage, and forward or backward?",
            says(r"take\(.*(none of this rank's|it goes by)|stages and micro-batches are counted")),
    Mistake("the wrong tensor is put", "What crosses between two stages?", says(r"was given |put\(.*goes by")),
    Mistake("xs or ys of another rank", "Which rank reads the tokens, and which the targets?",
            says(r"(IndexError|StopIteration)(.|\n)*\b(xs|ys)\b")),
    Mistake("the tokens have no gradient", "What would the gradient of whole numbers be?",
            says("only Tensors of floating")),
    Mistake("the graph is gone", KEEP, says("does not require grad and does not have a grad_fn|a second time")),
)
PLAY = Play(
    worlds,
    batches,
    tables=(
        (on_each_rank, (
            Mistake("the weights were stepped",
                    "Which W is the last one that this step has to wait for, and who calls the optimizer?",
                    lambda done: done.facts["changed"] == STEPPED and "the parameters have changed",
                    symptom="a loss that is right in the first step, and drifts: later micro-batches see other "
                        "weights"),
            replace(AFTERMATH[0], matches=lambda done: (name := done.facts["changed"] or done.left)
                    and f"after the call, {name} is not what it was"),
        )),
        (gradients, (
            Mistake("no gradient, or one that is not a number",
                    "Which parameters does the backward of this stage reach, and by what is the loss divided?",
                    lambda one: not one.received.isfinite().all()),
            Mistake("rounded on the way", "In which dtype does it cross, and in which is it added up?",
                    lambda one: one.near(one.received, one.expected, 2e-2)),
            Mistake("the loss is not divided by the number of micro-batches", COUNT, made(all_are)),
            Mistake("divided by the number of micro-batches twice", COUNT, made(lambda c, m: all_are(c, 1 / m))),
            Mistake("the gradients were set to zero",
                    "What had earlier micro-batches, and earlier batches, left in .grad?",
                    made(only_the_last), symptom="only the last micro-batch trains"),
            Mistake("divided by another number", COUNT, made(lambda c, m: all_are(c, float(c[0])))),
            Mistake("some micro-batches are weighted differently", COUNT, made(lambda c, m: True)),
            Mistake("not one process's losses",
                    "Which micro-batch does this instruction name, which x or y do you read, and what does each stage "
                    "put?", other_losses),
            Mistake("the wrong gradient came back",
                    "Follow one micro-batch: each stage puts the gradient of what, and with which gradient does the "
                    "next begin?", lambda one: one.name != f"stage {one.world.stages - 1}"),
            Mistake("the wrong loss was differentiated", "From what does the backward of the last stage begin?",
                    lambda one: True),
        )),
        (losses, (
            Mistake("no losses", "Who reports the loss, and of how many micro-batches?",
                    lambda one: one.description == "None"),
            Mistake("losses where none are due", "Which rank computes losses?", lambda one: one.expected is None),
            Mistake("the losses that are returned are divided",
                    "What is divided for the backward, and what is reported?",
                    lambda one: one.near(one.received, one.expected / len(one.expected))),
            Mistake("the losses are in another order",
                    "Which loss is that of micro-batch 0, if the list begins with another one?",
                    lambda one: isinstance(one.received, Tensor) and one.near(one.received.sort()[0],
                    one.expected.sort()[0])),
            Mistake("the losses keep their graphs",
                    "A loss is a number, and the end of a graph. Which of these does the caller need?",
                    lambda one: WITH_GRAPH in one.description,
                    symptom="memory that grows with the number of losses kept: a detach is missing"),
            Mistake("the losses are not tensors",
                    "They should be a list of tensors without dims. If they are numbers, when must the rank wait for "
                    "the device?", lambda one: isinstance(one.received, str)),
            Mistake("other losses", "What does the last stage make of its micro-batch's targets?", lambda one: True),
        )),
        (on_each_rank, (
            Mistake("retain_graph", "What does backward free as it goes, unless it is told to keep it?",
                    lambda done: done.facts["retained"]
                    and "the graph of a micro-batch is still there after its backward",
                    symptom="the right gradients, but the memory of all micro-batches"),
            Mistake("a name keeps a finished micro-batch",
                    "Which of your loop's names still refers to it when the next instruction begins, and what does "
                    "`del` do?", lambda done: done.facts["stale"] == 1 and not done.facts["kept"]
                    and "tensors of a micro-batch were there, after its B, when the next instruction began",
                    symptom="right, but a micro-batch more is alive than the schedule says"),
            Mistake("activations are kept after their backward", KEEP,
                    lambda done: (done.facts["stale"]
                    and f"those of {done.facts['stale']} micro-batches were there when the next began")
                    or (done.facts["kept"] and "some are there when all is done"),
                    symptom="1F1B with the memory of GPipe"),
        )),
    ),
    question=KEEP,
    raised=RAISED,
)
# fmt: on


@answered
def obey(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(instructions, stages, loss, xs, ys, take, put) -> losses`, for instructions F and B.

    The rank of the last stage returns each micro-batch's own loss, in the order of the micro-batches.

    Returns the text of the ✓ line.
    """
    try:
        seen = checked(PLAY, (fn,), seed).seen
    except Wrong as wrong:
        names = (only for world, only in ONLY.items() if says(rf"\(with .*({world})")(wrong.answer.text))
        raise wrong.with_name(next(names, "") if wrong.raised else "") from None
    same = bits((one.received, one.expected) for each in seen for one in ones(each))
    return (
        f"{len({str(each.world) for each in seen})} lists on 1, 2 and 4 ranks: losses and gradients are one process's"
        f"{same}, and nothing is kept after its backward"
    )
