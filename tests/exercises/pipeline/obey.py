"""Answers to `obey` of notebook 10: one rank's list is run."""

import torch

from labs.pp import B, F
from tests.answers import Exercise

# fmt: off
answers = Exercise("obey")

# ---- right ones ------------------------------------------------------------------------------------------


@answers.right(
    line="11 lists on 1, 2 and 4 ranks: losses and gradients are one process's, bit for bit, and nothing "
)
def obey(instructions, stages, loss, xs, ys, take, put):
    last = max(stages) if ys else None
    alive, losses = {}, {}
    for i in instructions:
        s, m = i.stage, i.microbatch
        if isinstance(i, F):
            x = xs[m] if s == 0 else take(F(s - 1, m)).requires_grad_()
            y = stages[s](x)
            if s == last:
                y = loss(y, ys[m])
                losses[m] = y.detach()
                y = y / len(ys)
            else:
                put(i, y.detach())
            alive[s, m] = x, y
        else:
            x, y = alive.pop((s, m))
            gradient = None if s == last else take(B(s + 1, m))
            y.backward(gradient)
            if s > 0:
                put(i, x.grad)
            del gradient
        del x, y
    found = [losses[m] for m in sorted(losses)]
    return found


@answers.right
def the_notebooks_loop(instructions, stages, loss, xs, ys, take, put):
    losses, alive = {}, {}

    def forward(s, m):
        is_last = bool(ys) and s == max(stages)
        taken = xs[m] if s == 0 else take(F(s - 1, m)).requires_grad_()
        made, value = stages[s](taken), None
        if is_last:
            made = loss(made, ys[m])
            value, made = made.detach(), made / len(ys)
        else:
            put(F(s, m), made.detach())
        return (taken, made), value

    for x in instructions:
        s, m = x.stage, x.microbatch
        if isinstance(x, F):
            alive[s, m], value = forward(s, m)
            losses |= {} if value is None else {m: value}
        else:
            taken, made = alive.pop((s, m))
            is_last = bool(ys) and s == max(stages)
            torch.autograd.backward(made, None if is_last else take(B(s + 1, m)))
            if s > 0:
                put(B(s, m), taken.grad)
            del taken, made
    return [losses[m] for m in sorted(losses)]


# Its writer took it for right: without the last line the names keep what the next F of another finds there.
HELD = {"            del taken, made\n": ""}
answers.spoil(the_notebooks_loop, "a name keeps a finished micro-batch", HELD)


def instead_of(old):
    """Return a function that notes wrong answers: `obey` with other words in place of `old`."""

    def spoiled(mistake, new, others=None, **options):
        answers.spoil(obey, mistake, {old: new} | (others or {}), **options)

    return spoiled


# ---- wrong: divided by what ------------------------------------------------------------------------------

divided = instead_of("y = y / len(ys)")
ANOTHER, WEIGHTS = "divided by another number", "some micro-batches are weighted differently"
divided("the loss is not divided by the number of micro-batches", "pass")
divided("divided by the number of micro-batches twice", "y = y / len(ys) / len(ys)")
divided(ANOTHER, "y = y / len(instructions)")
divided(WEIGHTS, "y = y / len(losses)")
divided("no gradient, or one that is not a number", "y = y / (0 * len(ys))")

# ---- wrong: the losses -----------------------------------------------------------------------------------

returned = instead_of("return found")
value = instead_of("losses[m] = y.detach()")
NOT_TENSORS, OTHER, NONE = "the losses are not tensors", "other losses", "no losses"
ORDER = "the losses are in another order"
returned("the losses that are returned are divided", "return [each / len(found) for each in found]")
returned(ORDER, "return list(losses.values())")
returned(NONE, "return None")
returned(NOT_TENSORS, "return losses")
returned(OTHER, "return [torch.stack(found).mean()] if found else []")
value("the losses keep their graphs", "losses[m] = y")
spoil = answers.slips(obey)

# ---- wrong: which micro-batch, which stage ---------------------------------------------------------------

taken = instead_of("x = xs[m] if s == 0 else take(F(s - 1, m)).requires_grad_()")
loss_of = instead_of("y = loss(y, ys[m])")
ONE_STAGE, OTHERS = "right only with one stage per rank", "xs or ys of another rank"
NOT_ONE = "not one process's losses"
IN_TURN = {"alive, losses = {}, {}": "alive, losses, turn = {}, {}, iter(range(len(xs or ys)))"}
INPUT = "else take(F(s - 1, m)).requires_grad_()"
taken(NOT_ONE, f"x = xs[next(turn)] if s == 0 {INPUT}", IN_TURN)
taken(ONE_STAGE, f"x = xs[m] if xs {INPUT}", alone=True)
spoil(OTHERS, "max(stages) if ys else None", "max(stages)", alone=True)

# ---- wrong: what is taken --------------------------------------------------------------------------------

ELSE = "something else is taken"
taken(ELSE, "x = xs[m] if s == 0 else take(F(s, m)).requires_grad_()", alone=True)
taken("no gradient to put", "x = xs[m] if s == 0 else take(F(s - 1, m))", alone=True)
taken("the tokens have no gradient", f"x = xs[m].requires_grad_() if s == 0 {INPUT}", alone=True)

# ---- wrong: what is put ----------------------------------------------------------------------------------

made = instead_of("put(i, y.detach())")
sent = instead_of("put(i, x.grad)")
NOT_PUT, TENSOR, BACK = "not put", "the wrong tensor is put", "the wrong gradient came back"
WRITTEN, TWICE = "changed after it was put", "put twice"
UNDER, FOR_NOBODY = "put under the wrong name", "put for nobody"
LATER = {
    "alive, losses = {}, {}": "alive, losses, late = {}, {}, []",
    "        del x, y\n": "        del x, y\n        if len(late) > 1:\n            put(*late.pop(0))\n",
    "return found": "[put(*each) for each in late]\n    return found",
}

made("put with its graph", "put(i, y)", alone=True)
made(TENSOR, "put(i, x.detach())", alone=True)
made(TWICE, "put(i, y.detach())\n                put(i, y.detach())", alone=True)
made(UNDER, "put(F(s + 1, m), y.detach())", alone=True)
OUT = "out = y.detach().clone()\n                put(i, out)\n                out.zero_()\n                del out"
made(WRITTEN, OUT, alone=True)
loss_of(FOR_NOBODY, "put(i, y.detach())\n                y = loss(y, ys[m])", alone=True)
made(NOT_PUT, "late.append((i, y.detach()))", LATER, alone=True)
sent(BACK, "put(i, torch.ones_like(x) if gradient is None else gradient)")


# ---- wrong: the backward ---------------------------------------------------------------------------------

backward = instead_of("y.backward(gradient)")
popped = instead_of("x, y = alive.pop((s, m))")
KEEPS, ZEROED = "activations are kept after their backward", "the gradients were set to zero"
backward("retain_graph", "y.backward(gradient, retain_graph=True)")
backward(ZEROED, "stages[s].zero_grad()\n            y.backward(gradient)")
GRAPHS = "the graph is gone"
spoil(GRAPHS, "alive[s, m] = x, y", "alive[s, m] = x, y.detach()", alone=True)
STEP = """y.backward(gradient)
            with torch.no_grad():
                for p in stages[s].parameters():
                    p -= 0.1 * p.grad"""
backward("the weights were stepped", STEP)
popped(KEEPS, "x, y = alive[s, m]")

# ---- wrong: what of the list, and in which order ---------------------------------------------------------

todo = instead_of("for i in instructions:")
LIST = "not in the order of the list"
todo(LIST, "for i in sorted(instructions, key=lambda i: (isinstance(i, B), i.microbatch)):", alone=True)
FIRST_IN = "right only where micro-batches come in their order"
popped(FIRST_IN, "x, y = alive.pop([*alive][0])", alone=True)
todo("part of the list is not done", "for i in instructions[:-1]:", alone=True)
