"""resume: what a training remembers, and how another one goes on from it as if nothing had happened.

An answer is right if the numbers after each following step are those of the undisturbed training.  The numbers directly
after resume tell the mistakes apart: they may be another rank's, or another moment's.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered, instead, says, show
from labs.exercises.engine.around_a_call import AFTERMATH
from labs.exercises.engine.by_script import Play, as_a_whole, as_found, checked, first_wrong, on_each_rank
from labs.exercises.engine.on_ranks import Draw
from labs.exercises.engine.scripts import Look, StepOutcomes
from labs.exercises.resume._restarting import LOST, Key, Kind, Numbers, RestartMoment, ResumedTraining, Story, same

MOMENTS = Kind.MEAN, Kind.SQUARE
IN_PLACE = Kind.PARAMETER, Kind.BUFFER, *MOMENTS, Kind.COUNT  # the kinds of numbers that a step changes in place
FIRST = "right only after a first step"
ROUNDED = torch.bfloat16, torch.float16


def worlds(draw: Draw) -> dict[int, list[ResumedTraining]]:
    t = draw.random.randint(2, 4)

    def case(*saves: int, only: str = "", frozen: bool = False) -> ResumedTraining:
        return draw.world(ResumedTraining, 2, saves=saves, only=only, frozen=frozen)

    return {
        2: [
            case(t),
            case(t, frozen=True),
            case(0, only=FIRST),
            case(t, t + 3, only="right only for the first restart"),
        ]
    }


def script(world: ResumedTraining, remember: Callable[..., Any], resume: Callable[..., Any]) -> Iterator[Look | None]:
    yield None
    before = random.getstate(), torch.get_rng_state()
    story = Story(world, remember, resume)
    facts = first_wrong(MISTAKES, story.moments()) or {"sizes": story.sizes}
    random.setstate(before[0])  # resume has to change the random states, so this is no leftover
    torch.set_rng_state(before[1])
    yield Look(facts=facts)


def describe(one: RestartMoment, key: Key) -> str:
    """Return a sentence about the training's number with this key, which is not the expected one."""
    what, found, expected = " ".join(key).strip(), one.received.get(key), one.expected[one.t][key]
    if key[0] == Kind.RANDOM:
        return f"{what} is not what it was"
    if found is None:
        return f"{what} is missing"
    if isinstance(found, Tensor) and isinstance(expected, Tensor) and found.shape == expected.shape:
        at = int((found != expected).flatten().byte().argmax())
        return f"element {at} of {what} is {instead(found.flatten()[at], expected.flatten()[at])}"
    return f"{what} is {show(found)}, and not {show(expected)}"


def remembered(matches: Callable[[RestartMoment], Any]) -> Callable[[RestartMoment], Any]:
    """Return a row's test that looks only at moments before any restart."""
    return lambda one: one.new is None and matches(one)


def wrong(
    matches: Callable[[RestartMoment, Key], Any], *kinds: str, every: bool = False
) -> Callable[[RestartMoment], str | None]:
    """Return a row's test: a description of the first number that is wrong after a restart and matches.

    kinds: the kinds of numbers that are looked at; without any, all kinds
    every: whether all wrong numbers must match
    """

    def row(one: RestartMoment) -> str | None:
        keys = [key for key in one.wrong if not kinds or key[0] in kinds] if one.lost else []
        fitting = [key for key in keys if matches(one, key)]
        return describe(one, fitting[0]) if fitting and (not every or fitting == keys) else None

    return row


def as_in(
    numbers: Callable[[RestartMoment], Numbers], *kinds: str, every: bool = False
) -> Callable[[RestartMoment], str | None]:
    """Return the row's test of `wrong` for numbers that are equal to those of `numbers(moment)`."""
    return wrong(lambda one, key: same(one.received.get(key), numbers(one).get(key)), *kinds, every=every)


def left_out(*kinds: str) -> Callable[[RestartMoment], str | None]:
    """Return a row's test: whether all these kinds are wrong, and their wrong numbers are as they were built."""
    matches = as_in(lambda one: one.new, *kinds, every=True)
    return lambda one: matches(one) if {kind for kind, _ in one.wrong} >= {*kinds} else None


def always(one: RestartMoment, key: Key) -> bool:
    return True


def rounded(one: RestartMoment, key: Key) -> bool:
    """Return whether a number is the expected one, rounded to a smaller dtype."""
    found, expected = one.received.get(key), one.expected[one.t][key]
    tensors = isinstance(found, Tensor) and isinstance(expected, Tensor)
    return tensors and any(torch.equal(found.float(), expected.to(dtype).float()) for dtype in ROUNDED)


def sent(seen: StepOutcomes) -> str | None:
    """Return a sentence about the collectives that were called, or None."""
    ops = sorted({event.op for event in seen.events} - {"barrier"})
    return f"right, but it calls {' and '.join(ops)}" if ops else None


# fmt: off
READS = "What does a step read, besides its parameters and its batch?"
KNOWS = "What has AdamW kept for each parameter, and how would the next step go without it?"
MISTAKES = (
    Mistake("nothing is remembered", "What does a training not know that has just been built?",
            remembered(lambda one: one.state is None and "remember returned None")),
    Mistake("not a dictionary", "By which name will resume find each thing?",
            remembered(lambda one: not isinstance(one.state, Mapping) and f"remember returned {show(one.state)}")),
    Mistake("remembering moves the random numbers", "What would dropout have drawn next, had nobody saved?",
            remembered(lambda one: "random" in one.left and f"{one.left} is not what it was before"),
            symptom="a training that takes another way as soon as it is saved"),
    Mistake("what is remembered cannot be saved", "How would this be written to a file?",
            remembered(lambda one: one.broke)),
    replace(AFTERMATH[0], matches=lambda one: "random" not in one.left and AFTERMATH[0].matches(one)),
    Mistake("remembering changes the training", "What is different for the next step, after somebody has saved?",
            remembered(lambda one: one.wrong and f"after remember {describe(one, one.wrong[0])}")),
    Mistake("the optimizer has other parameters than the model",
            "Which tensors was the optimizer given when it was built, and are they still the model's?",
            lambda one: one.strange and f"{one.strange} of the optimizer's parameters are not the model's",
            symptom="the loss stands still after a restart, without an error"),
    Mistake("nothing is resumed", "What must the new training be told, and by which lines?",
            lambda one: one.lost and one.begun_anew and "all is as it was built"),
    Mistake("what was remembered is not a copy", "Whose memory is it, and who writes into it in the next step?",
            as_in(lambda one: one.expected[one.t + LOST], *IN_PLACE),
            symptom="a checkpoint written while training goes on, and some of its numbers are of a later step"),
    Mistake("a moment that belongs to another parameter",
            "The new optimizer may have its parameters in another order. By what does a moment find its own?",
            wrong(lambda one, key: any(key[0] == kind and same(one.received.get(key), x)
                                       for (kind, _), x in one.expected[one.t].items()), *MOMENTS),
            symptom="no error, and a jump in the loss after a restart: the optimizer's state goes by number"),
    Mistake("what another rank remembers", "Whose numbers, and whose batches, does this rank go on with?",
            as_in(lambda one: one.other[one.t], Kind.PARAMETER, Kind.BUFFER, *MOMENTS)),
    Mistake("one random state for all ranks", "Whose dropout does this rank go on with?",
            as_in(lambda one: one.other[one.t], Kind.RANDOM), symptom="after a restart all ranks drop the same units"),
    Mistake("the optimizer is left out", KNOWS, left_out(*MOMENTS, Kind.COUNT),
            symptom="a jump in the loss after each restart, until the moments are there again"),
    Mistake("buffers are left out", "What does a model keep, besides its parameters?", left_out(Kind.BUFFER),
            symptom="after a restart the loss is right in training, or nearly, and wrong in evaluation"),
    Mistake("the schedule is left out", "What is the learning rate made from, in the step after the next?",
            left_out(Kind.SCHEDULE), symptom="a second warm-up after each restart"),
    Mistake("the data begin anew", "Which batches has the model seen already?", left_out(Kind.PLACE),
            symptom="after a restart the loss is a little too low: the model has seen these batches"),
    Mistake("the random state is left out", READS, left_out(Kind.RANDOM),
            symptom="a run that cannot be repeated to the last bit, though everything seems to be saved"),
    Mistake("the random numbers begin anew", "How many have been drawn since the seed was set?",
            as_in(lambda one: one.expected[0], Kind.RANDOM), symptom="the same dropout again after each restart"),
    Mistake("rounded on the way", "In which dtype does the training keep it?", wrong(rounded)),
    Mistake("", "Where is this number kept while nothing runs, and who brings it back?", wrong(always)),
    Mistake("", READS, lambda one: one.lost
            and f"all numbers are what they were; {one.broke or 'then it goes on in another way'}"),
)
PLAY = Play(
    worlds,
    script,
    tables=(
        (on_each_rank, as_found(MISTAKES)),
        (as_a_whole, (
            Mistake("ranks exchange what they remember", "Which of the other ranks' numbers does this one go on with?",
                    sent, symptom="right, but a save takes longer the more ranks there are, and rank 0 the more "
                        "memory"),
        )),
    ),
    question=READS,
    raised=(
        Mistake(FIRST, "What has AdamW kept for a parameter before its first step?",
                says(r"KeyError: '(step|exp_avg|exp_avg_sq)'[\s\S]*remember called after 0 steps")),
    ),
)
# fmt: on


@answered
def resume(remember: Callable[..., Any], resume: Callable[..., Any], seed: int) -> str:
    """Check two functions: with them a new training goes on as if nothing had happened.

    remember: `remember(model, optimizer, schedule, loader) -> state`
    resume: `resume(state, model, optimizer, schedule, loader)`

    Returns the text of the ✓ line, with the bytes that a rank remembers.
    """
    (found, needed), *_ = checked(PLAY, (remember, resume), seed).seen[0].done[0].facts["sizes"]
    return f"the same training, to the last bit; each rank remembers {found / needed:.2f} × the bytes that it needs"
