"""The mistakes in pipelines, in the order in which they are tried.

FORM        what was returned for a size: is it a list of instructions for each rank?
RUNS        can these lists be run, with these stages and micro-batches?
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE    what they amount to: bubble, and activations alive
DISOBEYED   what was raised where a list was to be obeyed
STEPS, GRADIENTS, LOSSES    what a rank did with a batch: its gradients are wrong, or they are right
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product
from math import isclose
from typing import TYPE_CHECKING, Any

from labs import pp
from labs.kit.checks.answer import Mistake
from labs.kit.checks.case import close
from labs.kit.checks.pipeline.body import MOST, STEPPED, WITH_GRAPH
from labs.pp.instructions import makes

if TYPE_CHECKING:
    from labs.kit.checks.pipeline.judge import One, Seen

# ---- is it a schedule? -----------------------------------------------------------------------------------


def nothing(seen: Seen) -> bool:
    return seen.lists == "None" or (isinstance(seen.lists, list) and not any(seen.lists))


def endless(seen: Seen) -> bool:
    return any(len(order) == MOST for order in [seen.lists, *seen.lists] if isinstance(order, list))


def flat(seen: Seen) -> str | bool:
    return any(isinstance(x, pp.Instruction) for x in seen.lists) and f"returned one list, of {len(seen.lists)} items"


def ragged(seen: Seen) -> str | bool:
    kinds = [order if isinstance(order, str) else f"a list of {len(order)}" for order in seen.lists]
    wrong = len(kinds) != seen.size.ranks or any(isinstance(order, str) for order in seen.lists)
    return wrong and f"returned {len(kinds)} items: {', '.join(kinds[:4])}"


def strange(seen: Seen) -> str | None:
    return seen.each(lambda rank, place, x: not isinstance(x, pp.Instruction))


RANKS = "What is the schedule of one rank, and how many ranks are there?"
# fmt: off
FORM = (
    Mistake("nothing is returned", "Who will obey the lists?", nothing),
    Mistake("not a list for each rank", RANKS,
            lambda seen: not isinstance(seen.lists, list) and f"returned {seen.lists}"),
    Mistake("it does not come to an end", "When has a rank done its last backward?", endless),
    Mistake("one list for all ranks", RANKS, flat),
    Mistake("not a list for each rank", RANKS, ragged),
    Mistake("not an instruction", "How is the forward of stage 0 and micro-batch 0 written: F(0, 0)?", strange),
)
# fmt: on

# ---- can it be run? --------------------------------------------------------------------------------------


def everywhere(other: Callable[[Seen, int], int]) -> Callable[[Seen], Any]:
    """Whether every stage is on this other rank."""
    return lambda seen: not seen.each(lambda rank, place, x: other(seen, x.stage) != rank) and wrong_rank(seen)


def wrong_rank(seen: Seen) -> str | None:
    size = seen.size
    return seen.each(
        lambda rank, place, x: x.stage >= size.stages or size.rank_of(x.stage) != rank,
        f"; rank r has {'stage r' if size.stages_per_rank == 1 else 'the stages r, r + p, ...'}",
    )


def no_such(seen: Seen) -> str | None:
    m = seen.size.microbatches
    return seen.each(lambda rank, place, x: x.microbatch >= m, f"; the micro-batches are 0 to {m - 1}")


def from_one(seen: Seen) -> str | None:
    return no_such(seen) if min((x.microbatch for order in seen.lists for x in order), default=0) == 1 else None


def twice(seen: Seen) -> str | None:
    before: set[pp.Instruction] = set()
    return seen.each(
        lambda rank, place, x: makes(x) in before or before.add(makes(x)), ", and has done that work before"
    )


def missing(kind: type[pp.Instruction]) -> Callable[[Seen], str | None]:
    """The first of this kind that stands nowhere; an I makes what a B makes, and wants a W."""

    def fits(seen: Seen) -> str | None:
        there = [x for order in seen.lists for x in order]
        halves = [(x.stage, x.microbatch) for x in there if isinstance(x, pp.I)]
        every = product(range(seen.size.stages), range(seen.size.microbatches))
        made = set(map(makes, there))
        for s, m in halves if kind is pp.W else every:
            if kind(s, m) not in made:
                lacks = pp.I(s, m) if kind is pp.B and halves else kind(s, m)
                return f"{lacks!r} is missing in the list of rank {seen.size.rank_of(s)}"
        return None

    return fits


def of_error(*kinds: type[pp.Instruction], says: str = "") -> Callable[[Seen], Any]:
    """What the validator says, where it stops at such an instruction."""
    return lambda seen: (
        seen.error
        and says in str(seen.error)
        and isinstance(seen.lists[seen.error.rank][seen.error.place], kinds or pp.Instruction)
        and str(seen.error)
    )


NEEDS = "What does this instruction need, and where in the list does that stand?"
# fmt: off
RUNS = (
    Mistake("the stages are in reverse", "Which rank reads the tokens?",
            everywhere(lambda seen, stage: seen.size.ranks - 1 - stage)),
    Mistake("neighbouring stages on one rank",
            "How often does a micro-batch come to each rank on its way forward, if stages r, r + p, ... are on rank r?",
            everywhere(lambda seen, stage: stage // seen.size.stages_per_rank),
            shows="an interleaved schedule with the bubble of 1F1B"),
    Mistake("a stage on another rank", "Which stages does rank r have?", wrong_rank),
    Mistake("micro-batches are counted from 1", "Which micro-batch is the first?", from_one),
    Mistake("a micro-batch that does not exist",
            "How often does each of your loops run, and which micro-batch does its last iteration take?",
            no_such),
    Mistake("the same work twice", "How often is each forward and each backward to be done?", twice),
    Mistake("a forward is missing", "How many forwards come before the first backward, and how many after?",
            missing(pp.F)),
    Mistake("a backward is missing", "How many backwards are left when the last forward is done?",
            missing(pp.B),
            shows="gradients that lack the last micro-batches: a warm-up without its cool-down"),
    Mistake("a W is missing", "When does each stage's last W come?", missing(pp.W)),
    Mistake("both a whole backward and a half of it", "B is I and W together: which of them are written here?",
            of_error(says="one too many")),
    Mistake("W before its I", "W multiplies by the gradient of the product. Who makes that?",
            of_error(pp.W, says="which it needs"),
            shows="a list that the validator refuses at a W"),
    Mistake("a backward before its forward", NEEDS,
            of_error(pp.B, pp.I, says="which it needs"),
            shows="a list that the validator refuses at a B"),
    Mistake("a later stage before an earlier one",
            "Through which stages has a micro-batch gone before it comes to this one?",
            of_error(pp.F, says="which it needs")),
    Mistake("the ranks wait in a circle", "Go round the circle: which of these ranks could do something else first?",
            of_error(says="wait for each other"),
            shows="a schedule that would hang; the validator names the circle"),
    Mistake("", NEEDS, of_error()),
)
# fmt: on

# ---- what does it amount to? -----------------------------------------------------------------------------


def has(seen: Seen, *kinds: type[pp.Instruction]) -> str | None:
    return seen.each(lambda rank, place, x: isinstance(x, kinds))


def early(seen: Seen) -> str | None:
    """A backward with a forward after it."""
    return seen.each(
        lambda rank, place, x: not isinstance(x, pp.F) and any(isinstance(y, pp.F) for y in seen.lists[rank][place:]),
        ", and forwards come after it",
    )


def disordered(seen: Seen) -> str | None:
    """After the same kind of a later micro-batch."""
    return seen.each(
        lambda rank, place, x: any(
            type(y) is type(x) and y.stage == x.stage and y.microbatch > x.microbatch for y in seen.lists[rank][:place]
        ),
        ", and has done the same for a later micro-batch before",
    )


def too_many(fits: Callable[[Seen], Any] = lambda seen: True) -> Callable[[Seen], str | bool]:
    return lambda seen: fits(seen) and seen.crowd


def too_long(fits: Callable[[Seen], Any] = lambda seen: True) -> Callable[[Seen], str | bool]:
    return lambda seen: fits(seen) and seen.wait


def at_once(seen: Seen) -> bool:
    """Each W directly after its I."""
    pairs = [pair for order in seen.lists for pair in pairwise(order) if isinstance(pair[1], pp.W)]
    return all(isinstance(x, pp.I) and x.microbatch == w.microbatch for x, w in pairs)


def at_the_end(seen: Seen) -> bool:
    """No W before the last I."""
    return not seen.each(
        lambda rank, place, x: isinstance(x, pp.W) and any(isinstance(y, pp.I) for y in seen.lists[rank][place:])
    )


def w_before_i(seen: Seen) -> str:
    """Of the last rank, for whose I's all others wait."""
    last = len(seen.lists) - 1
    place = next(place for place, x in enumerate(seen.lists[last]) if isinstance(x, pp.W))
    bubble, possible = seen.simulation.bubble, seen.target.bubble
    told = f"the bubble is {bubble:.1%}, but {possible:.1%} is possible"
    return f"{told}: {seen.at(last, place)}, while the other ranks wait for its next I"


def only_w_is_elsewhere(seen: Seen) -> bool:
    """Without its W's it is 1F1B."""
    kinds = {pp.F: pp.F, pp.I: pp.B, pp.B: pp.B}
    rest = [[kinds[type(x)](x.stage, x.microbatch) for x in order if type(x) in kinds] for order in seen.lists]
    return rest == [list(order) for order in pp.one_f_one_b(seen.size.ranks, seen.size.microbatches)]


# fmt: off
SPLIT = Mistake(
    "the backward is split", "Which two instructions is this schedule made of?", lambda s: has(s, pp.I, pp.W)
)
# fmt: on
SHORT = "How many forwards must rank r have done when the first gradient can come back to it?"
FREED = "What frees an activation, and what could stand before this forward?"
# fmt: off
BUBBLE = (
    Mistake("one micro-batch at a time", "What could a rank do until the gradient of its first micro-batch comes back?",
            too_long(lambda seen: max(seen.alive) <= seen.size.stages_per_rank),
            shows="a bubble of 100 % and more: only one rank works at any time"),
    Mistake("the micro-batches are in another order",
            "For which micro-batch does the rank before wait, while this one does another?",
            too_long(disordered)),
    Mistake("the bubble is too large", SHORT, too_long()),
)
CROWD = (
    Mistake("all forwards first", "A backward frees what its forward has kept. When could the first one begin?",
            too_many(lambda seen: not early(seen)),
            shows="memory that grows with the number of micro-batches"),
    Mistake("the same warm-up on every rank",
            "How long does a gradient take to come back to rank r, and how long to the last rank?",
            too_many(lambda seen: len({[isinstance(x, pp.F) for x in order].index(False)
            for order in seen.lists}) == 1)),
    Mistake("too many activations alive", FREED, too_many()),
)
GPIPE = (
    SPLIT,
    Mistake("a backward before the last forward", "GPipe is the simplest: which two phases does each rank have?",
            early),
    Mistake("the micro-batches are in another order",
            "One process adds up the gradients of micro-batches 0, 1, 2, ...: why do the bits depend on the order?",
            disordered),
)
# fmt: on
ONE_F_ONE_B = INTERLEAVED = (SPLIT, *CROWD, *BUBBLE)
# fmt: off
ZERO_BUBBLE = (
    Mistake("the backward is not split", "Of the two halves of a backward, for which one does another rank wait?",
            too_long(lambda seen: not has(seen, pp.I))),
    Mistake("all W at the end", "Until when is an activation held: until its I, or until its W?",
            too_many(at_the_end),
            shows="no bubble, but memory that grows with the number of micro-batches"),
    CROWD[0],
    Mistake("W directly after its I", "Nobody waits for a W. Where does a rank wait that could do one?",
            lambda seen: too_long(at_once)(seen) and w_before_i(seen),
            shows="a split backward with the bubble of 1F1B"),
    Mistake(
        "W's in the wrong places",
        "An activation is held until its W. Which W could stand where this rank waits, and which one must not wait?",
        lambda seen: (seen.crowd or seen.wait) if only_w_is_elsewhere(seen) else None,
    ),
    *CROWD[1:],
    *BUBBLE,
)
# fmt: on

# ---- what is raised, where a list is obeyed --------------------------------------------------------------


def raised(*patterns: str) -> Callable[[str], bool]:
    return lambda text: any(re.search(pattern, text) for pattern in patterns)


KEEP = "What must a rank keep from a micro-batch's forward until its backward, and what not?"
# fmt: off
DISOBEYED = (
    Mistake("part of the list is not done",
            "How often does your loop run, and for which instructions does it do nothing?",
            raised("was not done")),
    Mistake("not in the order of the list", "Who decides what comes next: the list, or your function?",
            raised("which the list has first"),
            shows="right numbers, but GPipe's memory whatever the schedule"),
    Mistake("no gradient to put",
            "Backward leaves one in the .grad of what its graph begins with. Is that what you took, and what you read?",
            raised("there is no gradient", "One of the differentiated Tensors does not require grad")),
    Mistake("put before it was done", "When is it there?", raised("before it was done")),
    Mistake("not put", "Who waits for it?", raised("was never put"), shows="a stage that waits for ever"),
    Mistake("put for nobody", "Which stage would take it? What nobody takes stays for ever.", raised("nobody waits")),
    Mistake("put with its graph", "What of it does another rank need?", raised("a tensor that requires a gradient")),
    Mistake("changed after it was put",
            "A message may wait before it leaves, and does not copy what is in it. Who still writes there?",
            raised("was changed afterwards"),
            shows="a gradient that is right on most days: it is overwritten before it has left"),
    Mistake("put under the wrong name", "What has this instruction made, and under which name?",
            raised("not in this rank's")),
    Mistake("put twice", "How often does a neighbour take it?", raised(r"put\(.*for the second time")),
    Mistake("taken twice", "Where do you keep what you have taken?", raised(r"take\(.*for the second time")),
    Mistake("not taken", "What does this instruction need, which another one has made?", raised("was never taken")),
    Mistake("something else is taken",
            "Which instruction makes what this one needs: of which stage, and forward or backward?",
            raised(r"take\(.*(none of this rank's|it goes by)", "stages and micro-batches are counted")),
    Mistake("the wrong tensor is put", "What crosses between two stages?", raised("was given ", r"put\(.*goes by")),
    Mistake("more than the list says", "Which line runs a stage that no instruction names?", raised("more often than")),
    Mistake("xs or ys of another rank", "Which rank reads the tokens, and which the targets?",
            raised(r"IndexError(.|\n)*\b(xs|ys)\b", r"StopIteration(.|\n)*\b(xs|ys)\b")),
    Mistake("micro-batches are counted where there are none",
            "Which rank has xs, and which one ys? Where is the loss divided?",
            raised("ZeroDivisionError")),
    Mistake("a backward without its gradient", "In a stage that is not the last, what does backward begin with?",
            raised("implicitly created only for scalar")),
    Mistake("the tokens have no gradient", "What would the gradient of whole numbers be?",
            raised("only Tensors of floating")),
    Mistake("the graph is gone", KEEP, raised("does not require grad and does not have a grad_fn", "a second time")),
    Mistake("", KEEP, raised("failed: Disobeyed")),
)
# fmt: on

# ---- what a rank did -------------------------------------------------------------------------------------


def times(factor: Callable[[One], float]) -> Callable[[One], Any]:
    """Whether all gradients are so many times too large."""
    return lambda one: (
        one.times is not None
        and isclose(one.times, factor(one), rel_tol=1e-3)
        and f"{one.first}\nIt is {one.times:.4g} × the mean."
    )


def made_of(fits: Callable[[list[float]], bool]) -> Callable[[One], Any]:
    return lambda one: (
        one.made_of is not None
        and fits([round(c, 3) for c in one.made_of])
        and f"{one.first}\nIt has {shown(one.made_of, '.3g')} times what is due of the micro-batches until now."
    )


def losses(fits: Callable[[One], Any]) -> Callable[[One], Any]:
    return lambda one: (
        not same(one.losses, one.due_losses)
        and fits(one)
        and f"the losses are {shown(one.losses)}; they should be {shown(one.due_losses)}"
    )


def same(found: Any, due: list[float]) -> bool:
    return numbers(found) and len(found) == len(due) and all(map(partial(isclose, rel_tol=1e-5), found, due))


def numbers(found: Any) -> bool:
    return isinstance(found, list) and not any(isinstance(x, str) for x in found)


def shown(values: Any, form: str = ".4f") -> str:
    told = ", ".join(x if isinstance(x, str) else f"{x:{form}}" for x in values)
    return values if isinstance(values, str) else f"[{told}]"


COUNT = "The batch's loss is the mean over how many micro-batches, and who divides by that?"
# fmt: off
STEPS = (
    Mistake("the weights were stepped",
            "Which W is the last one that this step has to wait for, and who calls the optimizer?",
            lambda found: found.left == STEPPED and "the parameters have changed",
            shows="a loss that is right in the first step, and drifts: later micro-batches see other weights"),
)
GRADIENTS = (
    Mistake("no gradient, or one that is not a number",
            "Which parameters does the backward of this stage reach, and by what is the loss divided?",
            lambda one: not one.gradients[one.wrong].isfinite().all() and f"in stage {one.wrong} a parameter has none"),
    Mistake("rounded on the way", "In which dtype does it cross, and in which is it added up?",
            lambda one: close(one.gradients[one.wrong], one.due[one.wrong], 2e-2) and one.first),
    Mistake("the loss is not divided by the number of micro-batches", COUNT, times(lambda one: one.case.microbatches)),
    Mistake("divided by the number of micro-batches twice", COUNT, times(lambda one: 1 / one.case.microbatches)),
    Mistake("the gradients were set to zero", "What had earlier micro-batches, and earlier batches, left in .grad?",
            made_of(lambda c: 0 in c and set(c) <= {0, 1} and c == sorted(c)),
            shows="only the last micro-batch trains"),
    Mistake("divided by another number", COUNT, times(lambda one: one.times)),
    Mistake("some micro-batches are weighted differently", COUNT, made_of(lambda c: True)),
    Mistake("not one process's losses",
            "Which micro-batch does this instruction name, which x or y do you read, and what does each stage put?",
            losses(lambda one: one.has_last and numbers(one.losses))),
    Mistake(
        "the wrong gradient came back",
        "Follow one micro-batch: each stage puts the gradient of what, and with which gradient does the next begin?",
        lambda one: one.wrong < one.case.stages - 1 and one.first,
    ),
    Mistake("the wrong loss was differentiated", "From what does the backward of the last stage begin?",
            lambda one: one.first),
)
LOSSES = (
    Mistake("the losses that are returned are divided", "What is divided for the backward, and what is reported?",
            losses(lambda one: same(one.losses, [loss / one.case.microbatches for loss in one.due_losses]))),
    Mistake("the losses are in another order",
            "Which loss is that of micro-batch 0, if the list begins with another one?",
            losses(lambda one: numbers(one.losses) and same(sorted(one.losses), sorted(one.due_losses)))),
    Mistake("no losses", "Who reports the loss, and of how many micro-batches?",
            losses(lambda one: one.losses in ([], "None"))),
    Mistake("losses where none are due", "Which rank computes losses?", losses(lambda one: not one.has_last)),
    Mistake("the losses keep their graphs",
            "A loss is a number, and the end of a graph. Which of these does the caller need?",
            losses(lambda one: WITH_GRAPH in one.losses),
            shows="memory that grows with the number of losses kept: a detach is missing"),
    Mistake(
        "the losses are not tensors",
        "They should be a list of tensors without dims. If they are numbers, when must the rank wait for the device?",
        losses(lambda one: not numbers(one.losses)),
    ),
    Mistake("other losses", "What does the last stage make of its micro-batch's targets?", losses(lambda one: True)),
    Mistake("retain_graph", "What does backward free as it goes, unless it is told to keep it?",
            lambda one: one.outcome.retained and "the graph of a micro-batch is still there after its backward",
            shows="the right gradients, but the memory of all micro-batches"),
    Mistake("a name keeps a finished micro-batch",
            "Which of your loop's names still refers to it when the next instruction begins, and what does `del` do?",
            lambda one: one.outcome.stale == 1 and not one.outcome.kept
            and "tensors of a micro-batch were there, after its B, when the next instruction began",
            shows="right, but a micro-batch more is alive than the schedule says"),
    Mistake("activations are kept after their backward", KEEP,
            lambda one: (one.outcome.stale
            and f"those of {one.outcome.stale} micro-batches were there when the next began")
            or (one.outcome.kept and "some are there when all is done"),
            shows="1F1B with the memory of GPipe"),
)
# fmt: on
