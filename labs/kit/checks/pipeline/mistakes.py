"""The mistakes in pipelines, in the order in which they are tried.

FORM        what was returned for a size: is it a list of instructions for each rank?
RUNS        can these lists be run, with these stages and micro-batches?
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE    what they come to: bubble, and activations alive
DISOBEYED   what was raised where a list was to be obeyed
OBEYED      what a rank did with a batch
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from labs import pp
from labs.kit.checks.answer import Mistake
from labs.kit.checks.pipeline.body import MOST
from labs.pp.instructions import makes

if TYPE_CHECKING:
    from labs.kit.checks.pipeline.judge import One, Seen

STALE = 2  # micro-batches that variables of a function still name, when the next one begins

# ---- is it a schedule? -----------------------------------------------------------------------------------


def flat(seen: Seen) -> bool:
    return any(isinstance(order, pp.Instruction) for order in seen.lists)


def endless(seen: Seen) -> bool:
    return any(len(order) == MOST for order in [seen.lists, *seen.lists] if isinstance(order, list))


def strange(seen: Seen) -> str | None:
    return seen.each(lambda rank, place, x: not isinstance(x, pp.Instruction))


RANKS = "What is the schedule of one rank, and how many ranks are there?"
FORM = (
    Mistake("nothing is returned", "Who is to obey the lists?", lambda seen: seen.lists == "None"),
    Mistake(
        "not a list for each rank", RANKS, lambda seen: not isinstance(seen.lists, list) and f"returned {seen.lists}"
    ),
    Mistake("it does not come to an end", "When has a rank done its last backward?", endless),
    Mistake(
        "one list for all ranks", RANKS, lambda seen: flat(seen) and f"returned one list, of {len(seen.lists)} items"
    ),
    Mistake(
        "not a list for each rank",
        RANKS,
        lambda seen: (
            (len(seen.lists) != seen.size.ranks or any(isinstance(order, str) for order in seen.lists))
            and f"returned {len(seen.lists)} items: {', '.join(map(kind, seen.lists[:4]))}"
        ),
    ),
    Mistake("not an instruction", "How is the forward of stage 0 and micro-batch 0 written: F(0, 0)?", strange),
)


def kind(order: Any) -> str:
    return order if isinstance(order, str) else f"a list of {len(order)}"


# ---- can it be run? --------------------------------------------------------------------------------------


def everywhere(other: Callable[[Seen, int], int]) -> Callable[[Seen], str | None]:
    """Whether every stage is on this other rank."""

    def fits(seen: Seen) -> str | None:
        here = seen.each(lambda rank, place, x: other(seen, x.stage) != rank)
        return None if here else wrong_rank(seen)

    return fits


def wrong_rank(seen: Seen) -> str | None:
    size = seen.size
    told = seen.each(lambda rank, place, x: x.stage >= size.stages or size.rank_of(x.stage) != rank)
    return told and f"{told}; rank r has {'stage r' if size.stages_per_rank == 1 else 'the stages r, r + p, ...'}"


def no_such(seen: Seen) -> str | None:
    m = seen.size.microbatches
    told = seen.each(lambda rank, place, x: x.microbatch >= m)
    return told and f"{told}; the micro-batches are 0 to {m - 1}"


def from_one(seen: Seen) -> str | None:
    return no_such(seen) if min((x.microbatch for order in seen.lists for x in order), default=0) == 1 else None


def twice(seen: Seen) -> str | None:
    counts: Counter = Counter()

    def again(rank: int, place: int, x: pp.Instruction) -> bool:
        counts[makes(x)] += 1
        return counts[makes(x)] > 1

    told = seen.each(again)
    return told and f"{told}, and has done that work before"


def missing(*kinds: type[pp.Instruction]) -> Callable[[Seen], str | None]:
    """The first that stands nowhere, of one of these kinds; an I counts as a B."""

    def fits(seen: Seen) -> str | None:
        there = {type(x)(x.stage, x.microbatch) for order in seen.lists for x in order}
        is_split = any(isinstance(x, pp.I | pp.W) for x in there)
        for s in range(seen.size.stages):
            for m in range(seen.size.microbatches):
                for kind in kinds:
                    alike = (pp.B(s, m), pp.I(s, m)) if kind is pp.B else (kind(s, m),)
                    if there.isdisjoint(alike) and (kind is not pp.W or (pp.I(s, m) in there)):
                        name = repr(pp.I(s, m) if kind is pp.B and is_split else kind(s, m))
                        return f"{name} is missing in the list of rank {seen.size.rank_of(s)}"
        return None

    return fits


def of_error(*kinds: type[pp.Instruction], says: str = "") -> Callable[[Seen], str | None]:
    """What the validator says, where it stops at such an instruction."""

    def fits(seen: Seen) -> str | None:
        if not seen.error or says not in str(seen.error):
            return None
        at = seen.lists[seen.error.rank][seen.error.place]
        return str(seen.error) if not kinds or isinstance(at, kinds) else None

    return fits


NEEDS = "What does this instruction need, and where in the list does that stand?"
RUNS = (
    Mistake("nothing is returned", "Who is to obey the lists?", lambda seen: not any(seen.lists) and "empty lists"),
    Mistake(
        "the stages are in reverse",
        "Which rank reads the tokens?",
        everywhere(lambda seen, stage: seen.size.ranks - 1 - stage),
    ),
    Mistake(
        "neighbouring stages on one rank",
        "How often does a micro-batch come to each rank on its way forward, if stages r, r + p, ... are on rank r?",
        everywhere(lambda seen, stage: stage // seen.size.stages_per_rank),
        shows="an interleaved schedule with the bubble of 1F1B",
    ),
    Mistake("a stage on another rank", "Which stages has rank r?", wrong_rank),
    Mistake("micro-batches are counted from 1", "Which micro-batch is the first?", from_one),
    Mistake(
        "a micro-batch that does not exist",
        "How often does each of your loops run, and which micro-batch does its last turn take?",
        no_such,
    ),
    Mistake("the same work twice", "How often is each forward and each backward to be done?", twice),
    Mistake(
        "a forward is missing", "How many forwards are before the first backward, and how many behind?", missing(pp.F)
    ),
    Mistake(
        "a backward is missing",
        "How many backwards are left when the last forward is done?",
        missing(pp.B),
        shows="gradients that lack the last micro-batches: a warm-up without its cool-down",
    ),
    Mistake("a W is missing", "When does each stage's last W come?", missing(pp.W)),
    Mistake(
        "both a whole backward and a half of it",
        "B is I and W together: which of them are written here?",
        lambda seen: seen.error and re.search("one too many", str(seen.error)) and str(seen.error),
    ),
    Mistake(
        "W before its I",
        "W multiplies with the gradient of the product. Who makes that?",
        of_error(pp.W, says="which it needs"),
        shows="a list that the validator refuses at a W",
    ),
    Mistake(
        "a backward before its forward",
        NEEDS,
        of_error(pp.B, pp.I, says="which it needs"),
        shows="a list that the validator refuses at a B",
    ),
    Mistake(
        "a later stage before an earlier one",
        "Through which stages has a micro-batch gone before it comes to this one?",
        of_error(pp.F, says="which it needs"),
    ),
    Mistake(
        "the ranks wait in a circle",
        "Go round the circle: which of these ranks could do something else first?",
        of_error(says="wait for each other"),
        shows="a schedule that would hang; the validator names the circle",
    ),
    Mistake("", NEEDS, of_error()),
)

# ---- what does it come to? -------------------------------------------------------------------------------


def has(seen: Seen, *kinds: type[pp.Instruction]) -> str | None:
    return seen.each(lambda rank, place, x: isinstance(x, kinds))


def early(seen: Seen) -> str | None:
    """A backward with a forward behind it."""
    return seen.each(
        lambda rank, place, x: not isinstance(x, pp.F) and any(isinstance(y, pp.F) for y in seen.lists[rank][place:])
    )


def too_many(fits: Callable[[Seen], Any] = lambda seen: True) -> Callable[[Seen], str | bool]:
    return lambda seen: seen.crowded is not None and fits(seen) and seen.crowd


def too_long(fits: Callable[[Seen], Any] = lambda seen: True) -> Callable[[Seen], str | bool]:
    return lambda seen: seen.waits and fits(seen) and seen.longest_wait


def one_by_one(seen: Seen) -> bool:
    return max(seen.alive) <= seen.size.stages_per_rank


def at_once(seen: Seen) -> bool:
    """Each W directly behind its I."""
    return all(
        isinstance(order[place - 1], pp.I) and order[place - 1].microbatch == x.microbatch
        for order in seen.lists
        for place, x in enumerate(order)
        if isinstance(x, pp.W)
    )


def at_the_end(seen: Seen) -> bool:
    """No W before the last I."""
    return not seen.each(
        lambda rank, place, x: isinstance(x, pp.W) and any(isinstance(y, pp.I) for y in seen.lists[rank][place:])
    )


SPLIT = Mistake(
    "the backward is split", "Which two instructions is this schedule made of?", lambda s: has(s, pp.I, pp.W)
)
SHORT = "How many forwards must rank r have done when the first gradient can come back to it?"
FREED = "What frees an activation, and what could stand before this forward?"
BUBBLE = (
    Mistake(
        "one micro-batch at a time",
        "What could a rank do until the gradient of its first micro-batch comes back?",
        too_long(one_by_one),
        shows="a bubble of 100 % and more: only one rank works at any time",
    ),
    Mistake("the bubble is too large", SHORT, too_long()),
)
CROWD = (
    Mistake(
        "all forwards first",
        "A backward frees what its forward has kept. When could the first one begin?",
        too_many(lambda seen: not early(seen)),
        shows="memory that grows with the number of micro-batches",
    ),
    Mistake(
        "the same warm-up on every rank",
        "How long does a gradient take to come back to rank r, and how long to the last rank?",
        too_many(lambda seen: len({seen.warmup(rank) for rank in range(seen.size.ranks)}) == 1),
    ),
    Mistake("too many activations alive", FREED, too_many()),
)
GPIPE = (
    SPLIT,
    Mistake(
        "a backward before the last forward",
        "GPipe is the simplest: which two phases has each rank?",
        lambda seen: (told := early(seen)) and f"{told}, and forwards come after it",
    ),
    BUBBLE[-1],
)
ONE_F_ONE_B = (SPLIT, *CROWD, *BUBBLE)
INTERLEAVED = (SPLIT, *CROWD, *BUBBLE)
ZERO_BUBBLE = (
    Mistake(
        "the backward is not split",
        "Of the two halves of a backward, for which one does another rank wait?",
        too_long(lambda seen: not has(seen, pp.I)),
    ),
    Mistake(
        "all W at the end",
        "Until when is an activation held: until its I, or until its W?",
        too_many(at_the_end),
        shows="no bubble, and memory that grows with the number of micro-batches",
    ),
    CROWD[0],
    Mistake(
        "W directly behind its I",
        "Nobody waits for a W. Where does a rank wait, and could do one?",
        too_long(at_once),
        shows="a split backward with the bubble of 1F1B",
    ),
    *CROWD[1:],
    *BUBBLE,
)

# ---- what is raised, where a list is obeyed --------------------------------------------------------------


def raised(*patterns: str) -> Callable[[str], bool]:
    return lambda text: any(re.search(pattern, text) for pattern in patterns)


KEEP = "What must a rank keep from a micro-batch's forward until its backward, and what not?"
DISOBEYED = (
    Mistake(
        "something of the list is not done",
        "How often does your loop run, and for which instructions does it do nothing?",
        raised("was not done"),
    ),
    Mistake(
        "not in the order of the list",
        "Who decides what comes next: the list, or your function?",
        raised("which the list has first"),
        shows="right numbers, and GPipe's memory whatever the schedule",
    ),
    Mistake(
        "the input of a stage requires no gradient",
        "Of what is the gradient that goes to the stage before, and does autograd know that it is wanted?",
        raised(r": its input has none", "One of the differentiated Tensors does not require grad"),
    ),
    Mistake(
        "the gradient is put before the backward",
        "When is it there?",
        raised(r"put\(\d+B\d+, \.\.\.\) before it was done"),
    ),
    Mistake("put before it was done", "When is it there?", raised(r"before it was done")),
    Mistake(
        "the gradient of the input is not put",
        "Who waits for it?",
        raised(r"\d+B\d+ was never put"),
        shows="the stage before waits for ever",
    ),
    Mistake("what a forward makes is not put", "Who waits for it?", raised(r"\d+F\d+ was never put")),
    Mistake(
        "the gradient of the output is put",
        "A stage takes the gradient of what it has made. Of what must it make one?",
        raised("that of its output, not of its input"),
    ),
    Mistake(
        "put under another name",
        "What has this instruction made, and who takes it by which name?",
        raised(r"not in this rank's list"),
    ),
    Mistake("put twice", "How often does a neighbour take it?", raised(r"put\(.*for the second time")),
    Mistake("taken twice", "Where do you keep what you have taken?", raised(r"take\(.*for the second time")),
    Mistake("not taken", "What does this instruction need, which another one has made?", raised("was never taken")),
    Mistake(
        "take of something else",
        "Which instruction makes what this one needs: of which stage, and forward or backward?",
        raised(
            r"take\(.*(behind which is nothing|none of this rank's|it goes by)", "stages and micro-batches are counted"
        ),
    ),
    Mistake(
        "another tensor is put",
        "What crosses between two stages?",
        raised(r"\.\.\.\) was given", "though its input", r"put\(.*goes by"),
    ),
    Mistake(
        "more than the list says",
        "Which line runs a stage that no instruction names?",
        raised("more often than the list"),
    ),
    Mistake(
        "xs or ys of another rank",
        "Which rank reads the tokens, and which the targets?",
        raised(r"IndexError(.|\n)*\b(xs|ys)\b", r"StopIteration(.|\n)*\b(xs|ys)\b"),
    ),
    Mistake(
        "micro-batches are counted where there are none",
        "Which rank has xs, and which one ys? Where is the loss divided?",
        raised("ZeroDivisionError"),
    ),
    Mistake(
        "a backward without its gradient",
        "From the end of a stage that is not the last, backward begins with what?",
        raised("implicitly created only for scalar"),
    ),
    Mistake(
        "the tokens have no gradient",
        "Tokens are whole numbers: what would their gradient be?",
        raised("only Tensors of floating point"),
    ),
    Mistake(
        "the graph is gone",
        KEEP,
        raised("does not require grad and does not have a grad_fn", "a second time"),
    ),
    Mistake("", KEEP, raised("failed: Disobeyed")),
)

# ---- what a rank did -------------------------------------------------------------------------------------


def times(factor: Callable[[One], float]) -> Callable[[One], Any]:
    """Whether all gradients are so many times too large."""

    def fits(one: One) -> str | bool:
        fit = one.wrong is not None and one.times is not None and abs(one.times / factor(one) - 1) < 1e-3
        return fit and f"{one.first}\nIt is {one.times:.4g} × the mean."

    return fits


def lacks(fits: Callable[[One, list[float]], bool]) -> Callable[[One], Any]:
    """By what it is made of."""

    def of(one: One) -> str | bool:
        if one.wrong is None or one.made_of is None or not fits(one, [round(c, 3) for c in one.made_of]):
            return False
        told = ", ".join(f"{c:.3g}" for c in one.made_of)
        return f"{one.first}\nOf the micro-batches until now it has {told} times what is due."

    return of


def losses(fits: Callable[[One], bool]) -> Callable[[One], Any]:
    return lambda one: (
        not same(one.losses, one.due_losses)
        and fits(one)
        and f"the losses are {shown(one.losses)}; they should be {shown(one.due_losses)}"
    )


def same(found: Any, due: list[float]) -> bool:
    alike = isinstance(found, list) and len(found) == len(due)
    return alike and all(abs(a - b) <= 1e-5 * abs(b) for a, b in zip(found, due, strict=True))


def shown(values: Any) -> str:
    return values if isinstance(values, str) else f"[{', '.join(f'{value:.4f}' for value in values)}]"


COUNT = "Of how many micro-batches is the batch's loss the mean, and who divides by that?"
OBEYED = (
    Mistake(
        "the weights were stepped",
        "Which W is the last one that this step has to wait for, and who calls the optimizer?",
        lambda one: one.outcome.stepped and "the parameters have changed",
        shows="a loss that is right in the first step, and drifts: later micro-batches see other weights",
    ),
    Mistake(
        "no longer in training mode",
        "What does dropout do there?",
        lambda one: one.outcome.idle and "a stage is in evaluation mode",
    ),
    Mistake(
        "not in the order of the list",
        "Who decides what comes next: the list, or your function?",
        lambda one: (
            one.done != one.order
            and f"this was done: {' '.join(map(repr, one.done))}; the list is {' '.join(map(repr, one.order))}"
        ),
    ),
    Mistake(
        "no gradient, or one that is no number",
        "Which parameters does the backward of this stage reach, and by what is the loss divided?",
        lambda one: (
            one.wrong is not None
            and not one.gradients[one.wrong].isfinite().all()
            and f"in stage {one.wrong} a parameter has none"
        ),
    ),
    Mistake(
        "the loss is not divided by the number of micro-batches",
        COUNT,
        times(lambda one: one.case.microbatches),
    ),
    Mistake("divided by the number of micro-batches twice", COUNT, times(lambda one: 1 / one.case.microbatches)),
    Mistake(
        "divided by the number of ranks or stages",
        COUNT,
        lambda one: (
            any(
                times(lambda one, n=n: one.case.microbatches / n)(one)
                for n in {len(one.case.lists), one.case.stages, len(one.due)} - {1}
            )
            and one.first
        ),
    ),
    Mistake(
        "the gradients were set to zero",
        "What had earlier micro-batches, and earlier batches, left in .grad?",
        lacks(lambda one, c: 0 in c and set(c) <= {0, 1} and c == sorted(c)),
        shows="only the last micro-batch trains",
    ),
    Mistake("divided by another number", COUNT, times(lambda one: one.times)),
    Mistake(
        "another weight for some micro-batches",
        COUNT,
        lacks(lambda one, c: True),
    ),
    Mistake(
        "other losses than one process's",
        "Which micro-batch does this instruction name, which x or y do you read, and what does each stage put?",
        lambda one: one.wrong is not None and one.has_last and losses(bool)(one),
    ),
    Mistake(
        "another gradient came back",
        "Follow one micro-batch: of what is the gradient that each stage puts, and with which does the next begin?",
        lambda one: one.wrong is not None and one.wrong < one.case.stages - 1 and one.first,
    ),
    Mistake(
        "another loss was differentiated",
        "From what does the backward of the last stage begin?",
        lambda one: one.wrong is not None and one.first,
    ),
    Mistake(
        "the losses that are returned are divided",
        "What is divided for the backward, and what is reported?",
        losses(lambda one: same(one.losses, [loss / one.case.microbatches for loss in one.due_losses])),
    ),
    Mistake(
        "the losses are in another order",
        "Which loss is that of micro-batch 0, if the list begins with another one?",
        losses(lambda one: isinstance(one.losses, list) and same(sorted(one.losses), sorted(one.due_losses))),
    ),
    Mistake("no losses", "Who reports the loss, and of how many micro-batches?", losses(lambda one: not one.losses)),
    Mistake("losses where none are due", "Which rank computes losses?", losses(lambda one: not one.has_last)),
    Mistake("other losses", "What does the last stage make of its micro-batch's targets?", losses(lambda one: True)),
    Mistake(
        "the losses keep their graphs",
        "A loss is a number, and the end of a graph. Which of these does the caller need?",
        lambda one: one.outcome.kept == "losses" and "the losses that were returned hold activations",
        shows="memory that grows with the number of losses kept: a detach is missing",
    ),
    Mistake(
        "retain_graph",
        "What does backward free as it goes, if nobody asks it to keep that?",
        lambda one: one.outcome.retained and "the graph of a micro-batch is still there after its backward",
        shows="the right gradients, and the memory of all micro-batches",
    ),
    Mistake(
        "activations are kept after their backward",
        KEEP,
        lambda one: (
            (
                one.outcome.stale > STALE
                and f"the activations of {one.outcome.stale} micro-batches were there, whose backward was over"
            )
            or (one.outcome.kept == "activations" and "activations are there when all is done")
        ),
        shows="1F1B with the memory of GPipe",
    ),
)
