"""Answers to accumulation(model, micro_batches)."""

from contextlib import nullcontext
from functools import partial

import torch  # noqa: F401 (varied answers use it)
import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("accumulation")
LINE = "you sent 1.50 × the gradients per rank and step, for 4 micro-batches; the least possible is 1.50 ×"


@answers.right(line=LINE)
def first_and_last(model, micro_batches):
    n = len(micro_batches)
    with model.no_sync():
        for micro_batch in micro_batches[:-1]:
            (model(*micro_batch) / n).backward()
    (model(*micro_batches[-1]) / n).backward()
    model.sync()


@answers.right(line=LINE)
def in_one_loop(model, micro_batches):
    n = len(micro_batches)
    for i, micro_batch in enumerate(micro_batches):
        with nullcontext() if i == n - 1 else model.no_sync():
            loss = model(*micro_batch) / n
            loss.backward()
    model.sync()


FIRST, LAST = "(model(*micro_batch) / n).backward()", "(model(*micro_batches[-1]) / n).backward()"
WHOLE = {FIRST: "model(*micro_batch).backward()", LAST: "model(*micro_batches[-1]).backward()"}
LOSS, SYNC = "loss = model(*micro_batch) / n", "model.sync()"
CONTEXT = "with nullcontext() if i == n - 1 else model.no_sync():"
# ---- which numbers ------------------------------------------------------------------------------------------

spoil = partial(answers.spoil, first_and_last)
loop = partial(answers.spoil, in_one_loop)
COUNT = "n = len(micro_batches)"

spoil("the loss is not divided by the number of micro-batches", WHOLE)
spoil("averaged twice", {COUNT: "n = len(micro_batches) * dist.get_world_size()"})
loop("only the last micro-batch counts", {CONTEXT: "model.zero_grad()\n        " + CONTEXT})
spoil("the gradient is zero", {SYNC: SYNC + "\n    model.zero_grad(set_to_none=False)"})
spoil("a gradient is gone", {SYNC: SYNC + "\n    model.zero_grad()"})
spoil("the parameters have changed", {SYNC: SYNC + "\n    torch.optim.SGD(model.parameters(), lr=0.1).step()"})
spoil("summed instead of averaged", {SYNC: SYNC
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


@answers.wrong("too many bytes")
def of_everybody(model, micro_batches):
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, micro_batches)
    every = [batch for part in everybodys for batch in part]
    with model.no_sync():
        for micro_batch in every:
            (model(*micro_batch) / len(every)).backward()


# ---- when it is synchronised ----------------------------------------------------------------------------------

ALWAYS = "synchronised at every micro-batch"
WITHIN = "the last backward is within no_sync()"
spoil("nothing synchronised", {SYNC: "pass"})  # left in flight, or not averaged at all
loop("forward outside of no_sync()", {CONTEXT: LOSS + "\n        " + CONTEXT, "            " + LOSS + "\n": ""})
loop(WITHIN, {CONTEXT: "with model.no_sync():"})


@answers.wrong(ALWAYS)
def every_time(model, micro_batches):
    for micro_batch in micro_batches:
        (model(*micro_batch) / len(micro_batches)).backward()
        model.sync()


# ---- what is held, told and left -----------------------------------------------------------------------------

LIST = "the caller's list has changed"
spoil(LIST, {COUNT: COUNT + "\n    last = micro_batches.pop()", "micro_batches[:-1]": "micro_batches",
    "micro_batches[-1]": "last"})
loop("the graphs of all micro-batches are kept", {COUNT: "n, losses = len(micro_batches), []",
    "loss.backward()": "losses.append(loss)\n            loss.backward(retain_graph=True)"})
