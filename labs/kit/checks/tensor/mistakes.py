"""The mistakes in tensor parallelism, in the order in which they are tried.

PLANS      what a rank raised that was to obey a plan
RESULT     a call on a rank: what it returned
FORM       a tensor, by its shape and dtype
BORDERS, ROWS, LOSSES, LAYERS    one that is not as on one process, by exercise
AFTER      a call: what else it has changed
SENT       one way of a call on a rank: what was sent
HELD       two calls: bytes held
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from labs.kit.checks.answer import Mistake, show
from labs.kit.checks.left import AFTERMATH
from labs.kit.checks.tensor.cases import Block, Loss

if TYPE_CHECKING:
    from labs.kit.checks.tensor.judge import One, Sent

# ---- what was returned, and changed ----------------------------------------------------------------------

CALLER = "What does the caller need to hold when you are done?"
STYLE = "What does each module split, what comes in and what goes out? labs/tp/tp.py has the table of styles."


def raised(pattern: str) -> Callable[[str], bool]:
    return lambda text: bool(re.search(pattern, text))


# fmt: off
PLANS = (
    Mistake("not a plan", STYLE, raised("is no plan|is no style")),
    Mistake("what is whole meets a piece",
            "Two tensors meet in this line: which one comes from a matrix that your plan splits, and which one "
            "does not?", raised("The size of tensor.* dimension 2")),
    Mistake("the sum comes whole, and x is a shard",
            "A residual adds what comes out to x: which part of x's sequence does this rank have?",
            raised("The size of tensor")),
    Mistake("q, k and v are not split alike", "By your plan, how many heads of q, of k and of v does this rank have?",
            raised("Number of heads in key")),
    Mistake("a cut goes through a head",
            "Which four matrices of attention must be cut at the same heads, and how do they learn where?",
            raised(r"failed: \w+: .*(unflatten|heads|query)")),
    Mistake("it cannot be obeyed", STYLE, raised("failed: (Value|Runtime)Error")),
)
RESULT = (
    Mistake("nothing is returned", CALLER,
            lambda call: call.returned == "None"),
    Mistake("not a tensor", CALLER,
            lambda call: isinstance(call.returned, str) and f"{call.returned} was returned"),
)
AFTER = (
    Mistake("changed in place", "Whose memory is that, and who may still read it?",
            lambda call: call.changed and f"{call.changed} is not what it was",
            shows="right in a test of its own, wrong in a model, where something else reads the same tensor"),
    Mistake("a collective that autograd does not see",
            "What is the backward of this collective, and who has told autograd?",
            lambda call: call.unseen and "torch warns: backward skips a collective, as if it were not there",
            shows="a warning from torch, and gradients that are right by luck"),
    *AFTERMATH,
)
# fmt: on


def form(fits: Callable[[One], bool]) -> Callable[[One], str | bool]:
    told = "{} is {}; this rank's is of {}, {}"
    return lambda one: fits(one) and told.format(one.what, show(one.found), one.case.dtype_name, tuple(one.due.shape))


ONE_BIAS = "The copies of the bias must stay equal: which gradient does each of them get?"
# fmt: off
FORM = (
    Mistake("the bias on one rank alone", ONE_BIAS,
            form(lambda one: one.name == "bias" and one.found is None
                 and any(one.on(r) is not None for r in one.members))),
    Mistake("no gradient",
            "Which of your lines does autograd not see: one under no_grad, on .data, or on a detached tensor?",
            form(lambda one: one.found is None),
            shows="the loss stands still: nothing in front of a split layer is trained"),
    Mistake("a matrix is not split", "Which part of it does this rank compute with?",
            form(lambda one: isinstance(one.case, Block) and one.found.numel() > one.due.numel()),
            shows="right, but each rank holds and multiplies a whole matrix"),
    Mistake("columns where rows belong, or rows where columns do",
            "Which matrix comes first, and leaves pieces behind, and which one takes them as they are?",
            form(lambda one: isinstance(one.case, Block) and one.found.shape != one.due.shape),
            shows="a plan of columns alone: right, but with a gather after each matrix"),
    Mistake("a different shape or dtype", "What are its shape and dtype on one process?",
            form(lambda one: one.found.shape != one.due.shape or one.found.dtype != one.case.dtype)),
)
# fmt: on

# ---- numbers ---------------------------------------------------------------------------------------------


def otherwise(question: str) -> tuple[Mistake, ...]:
    """The last rows of each exercise."""
    return (
        NOT_FINITE,
        Mistake("N times too large", "How many ranks add the same to it?", lambda one: one.times(one.n)),
        Mistake(
            "averaged instead of summed",
            "What do the summands make: a sum, or a mean?",
            lambda one: one.times(1 / one.n),
        ),
        Mistake(
            "rounded on the way",
            "In which dtype do the numbers travel, and in which are they added?",
            lambda one: one.same(one.due, 5e-3) and "It is right but for its last digits.",
        ),
        Mistake("", question, lambda one: True),
    )


# fmt: off
NOT_FINITE = Mistake(
    "not finite", "What is exp of 10,000, by what may all of the exponentials be divided, and what is 0 × ∞ or ∞ − ∞?",
    lambda one: not one.found.isfinite().all(), shows="a loss of inf or nan, late in a training")
SUMMED_TOO = Mistake("the gradient is summed as well",
                     "Is the gradient that comes back a summand, or is it whole, and the same on every rank?",
                     lambda one: not one.is_result and one.times(one.n),
                     shows="gradients N times too large before a layer, and not after it")
# fmt: on


def summands(question: str) -> Mistake:
    return Mistake("the summands are never added up", question, lambda one: one.is_result and one.alone)


# fmt: off
BORDERS = (
    Mistake("copy sends forward", "Every rank has all of x already: what could it lack?",
            lambda one: one.is_result and one.case.kind == "copy" and one.times(one.n)),
    summands("What does each rank have where a split layer ends?"),
    Mistake("the gradient of copy is not summed",
            "Each rank has used x for its own part of the weights. What does it know of x's gradient?",
            lambda one: not one.is_result and one.case.kind == "copy" and one.alone,
            shows="the loss goes down more slowly: the layers in front get only a part of their gradient"),
    SUMMED_TOO,
    *otherwise("Follow x through the split layer, and its gradient back: where is it whole, and where a summand?"),
)
# fmt: on


def bias_added(one: One, times: int) -> bool:
    """So many times, and not once?"""
    if not (one.is_result and one.case.biased and one.n > 1):
        return False
    return one.same(one.due + (times - 1) * one.case.brings(one.rank)["bias"].double())


# fmt: off
ROWS = (
    Mistake("the bias is added on every rank", "How many ranks add it, before the sum?",
            lambda one: bias_added(one, one.n),
            shows="a model with biases that is right on one rank, and wrong on more"),
    Mistake("the bias is left out", "Who adds it, and where?",
            lambda one: bias_added(one, 0)),
    Mistake("a rank without inputs leaves early",
            "Its summand of y is zero. Who waits for it, and who tells it what y is?",
            lambda one: one.is_result and one.alone and not one.forward.events and not one.brought("x").numel()),
    summands("What does each rank have of y?"),
    Mistake("the gradient of the bias is an N-th",
            "Every rank has all of the bias. How much of its gradient must it see?",
            lambda one: one.name == "bias" and one.times(1 / one.n),
            shows="the right output, and biases that learn N times too slowly"),
    Mistake("the bias on one rank alone", ONE_BIAS,
            lambda one: one.name == "bias" and not one.found.any(),
            shows="the right output, and copies of the bias that drift apart"),
    SUMMED_TOO,
    *otherwise("Which summand of y does this rank make, and who adds what to it?"),
)
# fmt: on


def by_own_highest(one: One) -> bool:
    """Exponentials relative to each rank's own highest logit, and added up as if to a common one."""
    brought = [one.case.brings(member) for member in one.members]
    rows = torch.cat([x - x.amax(1, True) for each in brought if (x := each["logits"].double()).shape[1]], 1)
    return one.same((rows.exp().sum(1).log() - rows.gather(1, brought[0]["targets"][:, None])[:, 0]).mean())


# fmt: off
LOSSES = (
    Mistake("summed over the tokens", "By what is the sum over all tokens divided?",
            lambda one: one.times(one.case.tokens)),
    Mistake("relative to each rank's own highest logit",
            "Exponentials are added up across ranks: relative to which maximum did each rank take them?",
            lambda one: one.is_result and by_own_highest(one)),
    SUMMED_TOO,
    Mistake("the gradient that comes in is left out",
            "The loss may be scaled before backward. Where does your gradient learn of it?",
            lambda one: not one.is_result and one.times(1 / float(one.case.comes_back(one.rank))),
            shows="right until the loss is divided by the number of micro-batches"),
    NOT_FINITE,
    Mistake("the right loss with a wrong gradient",
            "softmax, minus one at the target: over which columns, and on which rank?",
            lambda one: not one.is_result,
            shows="a loss that agrees with one process at step 0, and at no other"),
    *otherwise("Of which sums over the vocabulary is the loss made, and what does each rank add to them?"),
)
# fmt: on


def adds_up(one: One) -> bool:
    """The ranks have summands of it."""
    found = [one.on(rank) for rank in one.members]
    return one.n > 1 and all(isinstance(x, Tensor) for x in found) and torch.allclose(sum(found), one.due)


# fmt: off
LAYERS = (
    Mistake("a shard is taken for the whole",
            "Which tokens does this rank have when attention begins, and which does it have to see?",
            lambda one: one.is_result and one.case.sequence_parallel and not gathered(one.forward),
            shows="each rank attends to its own part of the sequence"),
    Mistake("the norms' gradients are not summed",
            "Under sequence parallelism a norm sees only its own rank's tokens. What does it know of its gradient?",
            lambda one: "norm" in one.name and adds_up(one),
            shows="with sequence parallelism, norms that drift apart"),
    SUMMED_TOO,
    *otherwise(STYLE),
)
# fmt: on

# ---- what was sent, and held -----------------------------------------------------------------------------


def too_much(fits: Callable[[Sent], Any]) -> Callable[[Sent], Any]:
    return lambda sent: sent.found > sent.enough and fits(sent) and sent.text


def gathered(sent: Sent) -> bool:
    ops = ("all_gather", "gather", "broadcast")
    return any(event.op in ops and event.dtype == sent.case.dtype_name for event in sent.events)


def reduced(sent: Sent) -> bool:
    return any(event.op == "reduce" for event in sent.events)


# fmt: off
SENT = (
    Mistake("something is sent where nothing is due", "What do the other ranks have already, and so need not be sent?",
            lambda sent: not sent.due_calls and sent.events and sent.text),
    Mistake("logits are gathered", "Which numbers of a token do the other ranks need, if not all of its logits?",
            too_much(lambda sent: isinstance(sent.case, Loss) and gathered(sent) and sent.found > 2 * sent.enough),
            shows="memory that grows with the vocabulary on every rank: nothing was gained by splitting the head"),
    Mistake("more than three numbers per token", "Which numbers about a token does every rank need from all others?",
            too_much(lambda sent: isinstance(sent.case, Loss))),
    Mistake("x crosses the border once for each matrix",
            "q, k and v read the same x, and so do gate and up. How often must it, or its gradient, travel?",
            too_much(lambda sent: isinstance(sent.case, Block)),
            shows="the right numbers, and more than twice the bytes"),
    Mistake("one rank adds up for all",
            "How much does that rank send, and how much does each rank send in an all-reduce?",
            too_much(lambda sent: any(event.op == "broadcast" for event in sent.events) and reduced(sent))),
    Mistake("gathered, where a sum belongs",
            "What does each rank have: a piece of the result, or a summand? What does splitting gain, if you gather?",
            too_much(gathered),
            shows="right, but each rank receives what the others hold: weights, or activations"),
    Mistake("a different dtype travels", "What does that cost?",
            too_much(lambda sent: any(event.dtype != sent.case.dtype_name for event in sent.events if event.sent))),
    Mistake("too many bytes", "How often does each number travel, and who needs it?", too_much(bool)),
    Mistake("a collective over the wrong ranks", "Who has called it, in that group?",
            lambda sent: sent.strangers and f"ranks {sorted(sent.strangers)} take part, but are not in the group"),
    Mistake("too many collectives", "What does each of them cost, however little it sends?",
            lambda sent: sent.calls > sent.due_calls + 0.01 and sent.text,
            shows="the right numbers and bytes, and a job that waits for the network"),
    Mistake("less than the least possible", "How else did the numbers get there?",
            lambda sent: sent.total < 0.999 * sent.least and sent.text),
)
HELD = (
    Mistake("something is kept from every call", "Which of your variables still refers to it when backward is over?",
            lambda held: (held.after[0] > 1.1 or held.after[1] > held.after[0] + 0.1)
            and held.told("after one call", *held.after)),
    Mistake("kept for backward, but not needed there", "Which numbers does your backward read?",
            lambda held: held.between > held.kept and held.told("between forward and backward", held.between),
            shows="activations that are as large as without splitting"),
    Mistake("too many copies at a time", "How many tensors of this size are there at the worst moment?",
            lambda held: held.most > held.enough and held.told("at the peak", held.most)),
)
# fmt: on
