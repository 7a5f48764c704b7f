"""Answers to accumulation(model, micro_batches)."""

from contextlib import ExitStack, nullcontext
from functools import partial

import torch
import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("accumulation")
LINE = "you sent 1.50 × the gradients per rank and step, for 4 micro-batches; the least possible is 1.50 ×"


@answers.right(line=LINE, blind=True)
def first_and_last(model, micro_batches):
    n = len(micro_batches)
    with model.no_sync():
        for micro_batch in micro_batches[:-1]:
            (model(*micro_batch) / n).backward()
    (model(*micro_batches[-1]) / n).backward()
    model.sync()


@answers.right(line=LINE, blind=True)
def in_one_loop(model, micro_batches):
    n = len(micro_batches)
    for i, micro_batch in enumerate(micro_batches):
        with nullcontext() if i == n - 1 else model.no_sync():
            loss = model(*micro_batch) / n
            loss.backward()
    model.sync()


@answers.right(line=LINE, blind=True, long=True)
def by_an_exit_stack(model, micro_batches):
    left = len(micro_batches)
    with ExitStack() as stack:
        stack.enter_context(model.no_sync())
        for micro_batch in micro_batches:
            left -= 1
            if not left:
                stack.close()
            model(*micro_batch).div(len(micro_batches)).backward()
    model.sync()


@answers.right(line=LINE, blind=True, long=True)
def one_behind(model, micro_batches):
    batches = iter(micro_batches)
    current = next(batches)
    for following in batches:
        with model.no_sync():
            (model(*current) / len(micro_batches)).backward()
        current = following
    (model(*current) / len(micro_batches)).backward()
    model.sync()


def divide(model, n):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(n)


FIRST, LAST = "(model(*micro_batch) / n).backward()", "(model(*micro_batches[-1]) / n).backward()"
WHOLE = {FIRST: "model(*micro_batch).backward()", LAST: "model(*micro_batches[-1]).backward()"}
LOSS, SYNC = "loss = model(*micro_batch) / n", "model.sync()"
CONTEXT = "with nullcontext() if i == n - 1 else model.no_sync():"
also_right = partial(answers.vary, first_and_last, line=LINE, blind=True)
also_right(WHOLE | {"model.sync()": "model.sync()\n    divide(model, n)"})
also_right({FIRST: WHOLE[FIRST], LAST: "divide(model, n)\n    " + LAST}, long=True)
answers.vary(in_one_loop, {LOSS: "loss = model(*micro_batch)",
    ".backward()": ".backward(torch.full_like(loss, 1 / n, requires_grad=False))"}, line=LINE, blind=True)

# ---- which numbers ------------------------------------------------------------------------------------------

spoil = partial(answers.spoil, first_and_last)
blind = partial(spoil, blind=True)
loop = partial(answers.spoil, in_one_loop)
COUNT = "n = len(micro_batches)"

blind("the loss is not divided by the number of micro-batches", WHOLE)
blind("divided by the wrong number", {COUNT: "n = dist.get_world_size()"})
blind("averaged twice", {COUNT: "n = len(micro_batches) * dist.get_world_size()"}, long=True)
blind("divided by the wrong number", {COUNT: "n = len(micro_batches[0][0])"})  # by the sequences
blind("divided by the wrong number", {COUNT: "n = 4"}, long=True)
blind("divided by the wrong number", {COUNT: "n = max(1, len(micro_batches) - 1)"})
blind("", {FIRST: WHOLE[FIRST]}, long=True)
spoil("divided by the number of micro-batches twice", {SYNC: SYNC + "\n    divide(model, n)"})
loop("only the last micro-batch counts", {CONTEXT: "model.zero_grad()\n        " + CONTEXT}, blind=True)
spoil("the gradient is zero", {SYNC: SYNC + "\n    model.zero_grad(set_to_none=False)"})
blind("a gradient is gone", {SYNC: SYNC + "\n    model.zero_grad()"})
spoil("", {COUNT: "micro_batches = micro_batches[:-1] or micro_batches\n    " + COUNT}, long=True)
blind("", {COUNT: "micro_batches = micro_batches[:-1]\n    " + COUNT}, long=True)
spoil("the parameters have changed", {SYNC: SYNC + "\n    torch.optim.SGD(model.parameters(), lr=0.1).step()"})
blind("", {"    with model": "    before = model.training\n    model.eval()\n    with model",
    LAST: "model.train(before)\n    " + LAST})
blind("", WHOLE | {SYNC: "for p in model.parameters():\n        "
    "if p.grad is not None:\n            p.grad = p.grad / n\n    " + SYNC}, long=True)
# A frozen one has none
blind("", WHOLE | {SYNC: SYNC + "\n    for p in model.parameters():\n        p.grad /= n"}, long=True)
blind("summed instead of averaged", {SYNC: SYNC
    + "\n    for p in model.parameters():\n        if p.grad is not None:\n            dist.all_reduce(p.grad)"})


@answers.wrong("only the last micro-batch is synchronised")
def the_last_gradients_only(model, micro_batches):
    *first, last = micro_batches
    with model.no_sync():
        for micro_batch in first:
            (model(*micro_batch) / len(micro_batches)).backward()
    before = {p: p.grad for p in model.parameters()}
    model.zero_grad()
    (model(*last) / len(micro_batches)).backward()
    model.sync()
    for p, gradient in before.items():
        if gradient is not None:
            p.grad += gradient


@answers.wrong("too many bytes", blind=True)
def of_everybody(model, micro_batches):
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, micro_batches)
    every = [batch for part in everybodys for batch in part]
    with model.no_sync():
        for micro_batch in every:
            (model(*micro_batch) / len(every)).backward()


# ---- when it is synchronised ----------------------------------------------------------------------------------

NOTHING, ALWAYS = "nothing synchronised", "synchronised at every micro-batch"
WITHIN = "the last backward is within no_sync()"
blind("nothing synchronised", {SYNC: "pass"})  # left in flight, or not averaged at all
loop(NOTHING, {CONTEXT: "with model.no_sync():", SYNC: "pass"})
loop(NOTHING, {CONTEXT: "with model.no_sync():",
    "loss.backward()\n    model.sync()": "loss.backward()\n            model.sync()"}, blind=True)
blind("too many bytes", {SYNC: SYNC + "\n    " + SYNC})
loop("", {CONTEXT: "with nullcontext():"}, blind=True, long=True)
loop("forward outside of no_sync()", {CONTEXT: LOSS + "\n        " + CONTEXT, "            " + LOSS + "\n": ""},
    blind=True)
loop("", {"            loss.backward()": "        loss.backward()"}, blind=True)
loop(WITHIN, {CONTEXT: "with model.no_sync():"}, blind=True)
blind(WITHIN, {LAST: "loss = model(*micro_batches[-1]) / n\n    with model.no_sync():\n        loss.backward()"},
    long=True)
loop("", {"i == n - 1": "i == 0"}, blind=True)
loop("", {"i == n - 1": "micro_batch is micro_batches[-1]"}, blind=True, long=True)
blind("one side of a message or a collective is missing", {SYNC: "if dist.get_rank() == 0:\n        model.sync()"},
    alone=True, long=True)


@answers.wrong(ALWAYS, blind=True)
def every_time(model, micro_batches):
    for micro_batch in micro_batches:
        (model(*micro_batch) / len(micro_batches)).backward()
        model.sync()


@answers.wrong("only the first micro-batch is synchronised")
def after_the_first(model, micro_batches):
    for i, micro_batch in enumerate(micro_batches):
        with nullcontext() if i == 0 else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()
            if i == 0:
                model.sync()


# ---- what is held, told and left -----------------------------------------------------------------------------

GRAPHS, LIST = "the graphs of all micro-batches are kept", "the caller's list has changed"
blind(LIST, {COUNT: COUNT + "\n    last = micro_batches.pop()", "micro_batches[:-1]": "micro_batches",
    "micro_batches[-1]": "last"})
loop(LIST, {CONTEXT: "micro_batches[i] = None\n        " + CONTEXT}, blind=True)
spoil("something is left behind", {COUNT: COUNT + "\n    torch.manual_seed(0)"})
spoil("too many bytes", {SYNC: SYNC + "\n    for _ in micro_batches:\n        dist.all_reduce(torch.zeros(()))"},
    long=True)
loop("too many bytes", {COUNT: COUNT + "\n    total = 0.0",
    "loss.backward()": "loss.backward()\n            total = total + loss.detach()",
    SYNC: "dist.all_reduce(total)\n    model.sync()"}, blind=True)
loop("the graphs of all micro-batches are kept", {COUNT: "n, losses = len(micro_batches), []",
    "loss.backward()": "losses.append(loss)\n            loss.backward(retain_graph=True)"}, blind=True)
loop("the graphs of all micro-batches are kept", {"loss.backward()": "loss.backward(retain_graph=True)"}, blind=True,
    long=True)


@answers.wrong("forward outside of no_sync()", blind=True)
def one_backward(model, micro_batches):
    sum(model(*micro_batch) for micro_batch in micro_batches).div(len(micro_batches)).backward()
    model.sync()


@answers.wrong(GRAPHS)
def the_losses_first(model, micro_batches):
    with model.no_sync():
        losses = [model(*micro_batch) for micro_batch in micro_batches[:-1]]
    (sum(losses, model(*micro_batches[-1])) / len(micro_batches)).backward()
    model.sync()


@answers.wrong("the graphs of all micro-batches are kept", blind=True, long=True)
def forwards_first(model, micro_batches):
    n = len(micro_batches)
    with model.no_sync():
        losses = [model(*micro_batch) / n for micro_batch in micro_batches[:-1]]
    losses.append(model(*micro_batches[-1]) / n)
    with model.no_sync():
        for loss in losses[:-1]:
            loss.backward()
    losses[-1].backward()
    model.sync()


@answers.wrong("the graphs of all micro-batches are kept", blind=True)
def concatenated(model, micro_batches):
    model(*(torch.cat(parts) for parts in zip(*micro_batches, strict=True))).backward()
    model.sync()


@answers.wrong("the graphs of all micro-batches are kept", blind=True, long=True)
def two_at_once(model, micro_batches):
    n = len(micro_batches)
    early, late = micro_batches[:-2], micro_batches[-2:]
    with model.no_sync():
        for i in range(0, len(early), 2):
            sum(model(*micro_batch) for micro_batch in early[i : i + 2]).div(n).backward()
        losses = [model(*micro_batch) for micro_batch in late[:-1]]
    losses.append(model(*late[-1]))
    sum(losses).div(n).backward()
    model.sync()
