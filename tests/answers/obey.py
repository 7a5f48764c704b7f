"""Answers to `obey` of notebook 10: one rank's list is run."""

import torch

from labs.pp import B, F
from tests.answers import Exercise

# fmt: off
answers = Exercise("obey")
STAYS, KEPT = {}, []  # from batch to batch

# ---- right ones ------------------------------------------------------------------------------------------


@answers.right(
    line="11 lists on 1, 2 and 4 ranks: losses and gradients are one process's, bit for bit, and nothing ", blind=True
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


@answers.right(blind=True)
def two_functions(instructions, stages, loss, xs, ys, take, put):
    """Nothing of a micro-batch in the frame that stays; divided as the backward begins."""
    last = max(stages) if ys else None
    kept, losses = {}, [None] * len(ys)

    def go(s, m):
        x = xs[m] if s == 0 else take(F(s - 1, m)).detach().requires_grad_()
        y = stages[s](x)
        if s == last:
            y = loss(y, ys[m])
            losses[m] = y.detach()
        else:
            put(F(s, m), y.detach())
        kept[s, m] = x, y

    def back(s, m):
        x, y = kept.pop((s, m))
        if s == last:
            (y / len(ys)).backward()
        else:
            y.backward(take(B(s + 1, m)))
        if s:
            put(B(s, m), x.grad.detach())

    for each in instructions:
        (go if isinstance(each, F) else back)(each.stage, each.microbatch)
    return losses


@answers.right(blind=True)
def closures(instructions, stages, loss, xs, ys, take, put):
    """What is kept is a function that goes back."""
    goes_back, losses = {}, {}

    def do_forward(s, m):
        is_last = len(ys) > 0 and s == max(stages)
        x = take(F(s - 1, m)).requires_grad_() if s != 0 else xs[m]
        y = stages[s](x)
        if is_last:
            y = loss(y, ys[m])
            losses[m] = y.detach().clone()
            y = y / len(ys)
        else:
            put(F(s, m), y.detach())

        def go_back():
            torch.autograd.backward(y, None if is_last else take(B(s + 1, m)))
            return x.grad if s != 0 else None

        return go_back

    for i in instructions:
        if isinstance(i, F):
            goes_back[i.stage, i.microbatch] = do_forward(i.stage, i.microbatch)
        elif i.stage == 0:
            goes_back.pop((i.stage, i.microbatch))()
        else:
            put(i, goes_back.pop((i.stage, i.microbatch))())
    return [losses[m] for m in range(len(losses))]


@answers.right(blind=True, long=True)
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
answers.spoil(the_notebooks_loop, "a name keeps a finished micro-batch", HELD, blind=True)


@answers.right
def by_methods(instructions, stages, loss, xs, ys, take, put):
    class Rank:
        def __init__(self):
            self.graphs, self.losses = {}, {}

        def forward(self, s, m):
            if s == 0:
                given = xs[m]
            else:
                given = take(F(s - 1, m))
                given.requires_grad = True
            out = stages[s](given)
            if s == last:
                out = loss(out, ys[m]) / len(ys)
                self.losses[m] = out.detach() * len(ys)
            else:
                put(F(s, m), out.detach())
            self.graphs[s, m] = given, out

        def backward(self, s, m):
            given, out = self.graphs.pop((s, m))
            torch.autograd.backward([out], [None if s == last else take(B(s + 1, m))])
            if s > 0:
                put(B(s, m), given.grad)

    last = max(stages) if len(ys) else -1
    rank = Rank()
    for x in instructions:
        {"F": rank.forward, "B": rank.backward}[type(x).__name__](x.stage, x.microbatch)
    return [rank.losses[m] for m in range(len(ys))]


# One tensor with all losses can be gone through like a list.  Its writer took it for wrong.
STACKED = {"return found": "return torch.stack(found) if found else []"}
answers.vary(obey, STACKED, blind=True)
GRADIENT, BACKWARD = "None if s == last else take(B(s + 1, m))", "            y.backward(gradient)\n"
# Divided in the gradient.
ONES = "torch.ones_like(y) / len(ys) if s == last else take(B(s + 1, m))"
SEEDED = {"y = y / len(ys)": "pass", GRADIENT: ONES, "y.backward(gradient)": "torch.autograd.backward([y], [gradient])"}
answers.vary(obey, SEEDED, blind=True, long=True)
# Sums by hand.
SUMS = """            trained = [p for p in stages[s].parameters() if p.requires_grad]
            grads = torch.autograd.grad(y, trained + [x] * (s > 0), gradient, allow_unused=True)
            for p, g in zip(trained, grads, strict=False):
                if g is not None:
                    p.grad = g.clone() if p.grad is None else p.grad + g
"""
answers.vary(
    obey, {BACKWARD: SUMS, "put(i, x.grad)": "put(i, grads[-1])", "del gradient": "del gradient, grads"}, blind=True
)
# The gradient of the input leaves before those of the weights are there.
PUT = "            if s > 0:\n                put(i, x.grad)\n"
INPUT_FIRST = """            if s > 0:
                put(i, torch.autograd.grad(y, x, gradient, retain_graph=True)[0])
            weights = [p for p in stages[s].parameters() if p.requires_grad]
            for p, g in zip(weights, torch.autograd.grad(y, weights, gradient), strict=True):
                p.grad = g if p.grad is None else p.grad + g
"""
SHARE = "torch.tensor(1 / len(ys), dtype=y.dtype) if s == last else take(B(s + 1, m))"
answers.vary(obey,
    {"take(F(s - 1, m)).requires_grad_()": "take(F(s - 1, m)).detach().clone().requires_grad_(True)",
     "put(i, y.detach())": "put(i, y.data)",
     "y = y / len(ys)": "pass",
     GRADIENT: SHARE,
     BACKWARD + PUT: INPUT_FIRST,
     "return found": "return torch.stack(found) if found else ()"})


def instead_of(old):
    """What spoils the right answer where these words stand."""

    def spoiled(mistake, new, others=None, **options):
        answers.spoil(obey, mistake, {old: new} | (others or {}), **options)

    return spoiled


# ---- wrong: divided by what ------------------------------------------------------------------------------

divided = instead_of("y = y / len(ys)")
ANOTHER, WEIGHTS = "divided by another number", "some micro-batches are weighted differently"
divided("the loss is not divided by the number of micro-batches", "pass", blind=True)
divided("divided by the number of micro-batches twice", "y = y / len(ys) / len(ys)")
divided(ANOTHER, "y = y / len(instructions)", blind=True)
divided(ANOTHER, "y = y / len(ys[m])", blind=True)
divided(ANOTHER, "y = y / (len(ys) * (s + 1))", blind=True, long=True)
divided(ANOTHER, "y = y / torch.distributed.get_world_size()", long=True)
divided(ANOTHER, "y = y / len(ys) / len(ys[0])", long=True)
divided(ANOTHER, "y = y * ys[0].numel() / len(ys)", long=True)
divided("no gradient, or one that is not a number", "y = y / (0 * len(ys))")
divided(WEIGHTS, "y = y / len(losses)", blind=True)

GRADS = "[p.grad for stage in stages.values() for p in stage.parameters() if p.grad is not None]"
AFTERWARDS = f"[g.div_(1 + max(i.microbatch for i in instructions)) for g in {GRADS}]\n    return found"
divided(WEIGHTS, "pass", {"return found": AFTERWARDS}, blind=True)  # what earlier batches have left, once more

# ---- wrong: the losses -----------------------------------------------------------------------------------

returned = instead_of("return found")
value = instead_of("losses[m] = y.detach()")
NOT_TENSORS, OTHER, NONE = "the losses are not tensors", "other losses", "no losses"
ORDER = "the losses are in another order"
returned("the losses that are returned are divided", "return [each / len(found) for each in found]", blind=True)
returned(ORDER, "return list(losses.values())", blind=True)
returned(ORDER, "return list(losses.values())[::-1]")
returned(NONE, "return None", blind=True)
returned(NONE, "return found or None", blind=True)
returned(NOT_TENSORS, "return losses", blind=True)
returned(OTHER, "return [torch.stack(found).mean()] if found else []", blind=True)
value(NOT_TENSORS, "losses[m] = y.item()", blind=True)
value(NOT_TENSORS, "losses[m] = y.detach().reshape(1)", blind=True, long=True)
value("the losses keep their graphs", "losses[m] = y", blind=True)
value(OTHER, "if not losses:\n                    losses[m] = y.detach()", blind=True)
spoil = answers.slips(obey)
spoil(OTHER, "alive, losses = {}, {}", "alive, losses = {}, STAYS", blind=True, long=True)

# ---- wrong: which micro-batch, which stage ---------------------------------------------------------------

taken = instead_of("x = xs[m] if s == 0 else take(F(s - 1, m)).requires_grad_()")
loss_of = instead_of("y = loss(y, ys[m])")
ONE_STAGE, OTHERS = "right only with one stage per rank", "xs or ys of another rank"
NOT_ONE = "not one process's losses"
IN_TURN = {"alive, losses = {}, {}": "alive, losses, turn = {}, {}, iter(range(len(xs or ys)))"}
INPUT = "else take(F(s - 1, m)).requires_grad_()"
taken(NOT_ONE, f"x = xs[next(turn)] if s == 0 {INPUT}", IN_TURN, blind=True)
loss_of(NOT_ONE, "y = loss(y, ys[next(turn)])", IN_TURN, blind=True)
taken(ONE_STAGE, f"x = xs[m] if xs {INPUT}", blind=True, alone=True)
spoil(ONE_STAGE, "y = stages[s](x)", "y = next(iter(stages.values()))(x)", blind=True, alone=True)
BY_M = {"alive[s, m] = x, y": "alive[m] = x, y", "alive.pop((s, m))": "alive.pop(m)"}
spoil(ONE_STAGE, BY_M, blind=True, alone=True, long=True)
BY_YS = {"if s == last:\n": "if ys:\n", "None if s == last": "None if ys"}
spoil(ONE_STAGE, BY_YS, blind=True, alone=True, long=True)
spoil(OTHERS, "max(stages) if ys else None", "max(stages)", blind=True, alone=True)
taken(OTHERS, f"x = xs[m] if s == min(stages) {INPUT}", blind=True, alone=True)
taken(OTHERS, "x = xs[m]", alone=True, long=True)

# ---- wrong: what is taken --------------------------------------------------------------------------------

gradient_of = instead_of("gradient = None if s == last else take(B(s + 1, m))")
ELSE = "something else is taken"
taken(ELSE, "x = xs[m] if s == 0 else take(F(s, m)).requires_grad_()", blind=True, alone=True)
gradient_of(ELSE, "gradient = None if s == last else take(B(s, m))", blind=True, alone=True)
gradient_of(ELSE, "gradient = take(B(s + 1, m))", blind=True, alone=True, long=True)
taken("no gradient to put", "x = xs[m] if s == 0 else take(F(s - 1, m))", blind=True, alone=True)
taken("", "x = xs[m] if s == 0 else take(F(s - 1, m)).bfloat16().float().requires_grad_()", blind=True, alone=True)
taken("the tokens have no gradient", f"x = xs[m].requires_grad_() if s == 0 {INPUT}", blind=True, alone=True)
ALL = "[each.requires_grad_() for each in xs if each.is_floating_point()]"
taken("something is left behind", f"{ALL}\n            x = xs[m] if s == 0 {INPUT}", long=True)

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

made("put with its graph", "put(i, y)", blind=True, alone=True)
made(TENSOR, "put(i, x.detach())", blind=True, alone=True)
made(TENSOR, "put(i, y.detach().bfloat16())", blind=True, alone=True)
made(TENSOR, "put(i, (y.detach(), m))", alone=True, long=True)
made(TWICE, "put(i, y.detach())\n                put(i, y.detach())", blind=True, alone=True)
sent(TWICE, "put(i, x.grad)\n                put(i, x.grad)", alone=True)
made(UNDER, "put(F(s + 1, m), y.detach())", blind=True, alone=True)
sent(UNDER, "put(B(s - 1, m), x.grad)", blind=True, alone=True)
OUT = "out = y.detach().clone()\n                put(i, out)\n                out.zero_()\n                del out"
made(WRITTEN, OUT, blind=True, alone=True)
sent(WRITTEN, "put(i, x.grad)\n                x.grad.zero_()", blind=True, alone=True)
loss_of(FOR_NOBODY, "put(i, y.detach())\n                y = loss(y, ys[m])", blind=True, alone=True)
sent(FOR_NOBODY, "put(i, x.grad)\n            else:\n                put(i, torch.zeros(1))", blind=True, alone=True)
returned(FOR_NOBODY, "[put(F(last, m), each) for m, each in enumerate(found)]\n    return found", alone=True, long=True)
made(NOT_PUT, "late.append((i, y.detach()))", LATER, blind=True, alone=True)
sent(NOT_PUT, "late.append((i, x.grad))", LATER, blind=True, alone=True, long=True)
sent(NOT_PUT, "pass", blind=True, alone=True)
made(NOT_PUT, "pass", alone=True, long=True)
sent(BACK, "put(i, torch.ones_like(x) if gradient is None else gradient)", blind=True)
sent(BACK, "put(i, x.detach())", blind=True)
sent(BACK, "put(i, x.grad.roll(1, 0))", long=True)
sent(BACK, "put(i, x.grad if gradient is None else gradient)", long=True)
sent("no gradient to put", "put(i, gradient)", alone=True)
sent("rounded on the way", "put(i, x.grad.bfloat16().to(x.dtype))")
EARLY = "[put(i, torch.zeros_like(x)) for _ in range(s > 0)]\n            y.backward(gradient)"
sent("put before it was done", "pass", {"y.backward(gradient)": EARLY}, alone=True)


@answers.wrong(NOT_PUT, alone=True, long=True)
def puts_before_it_takes(instructions, stages, loss, xs, ys, take, put):
    """As late as can be: the first rank has done all of its warm-up by then."""
    late = []

    def hand_over():
        while late:
            put(*late.pop(0))

    losses = obey(
        instructions, stages, loss, xs, ys, lambda x: (hand_over(), take(x))[1], lambda x, y: late.append((x, y))
    )
    hand_over()
    return losses


# ---- wrong: the backward ---------------------------------------------------------------------------------

backward = instead_of("y.backward(gradient)")
popped = instead_of("x, y = alive.pop((s, m))")
KEEPS, ZEROED = "activations are kept after their backward", "the gradients were set to zero"
backward(BACK, "y.backward(None if s == last else torch.ones_like(gradient))", blind=True, long=True)
EVERY = "y.backward(gradient if s == last else gradient / (1 + max(i.microbatch for i in instructions)))"
backward("divided by the number of micro-batches twice", EVERY, blind=True)
backward("retain_graph", "y.backward(gradient, retain_graph=True)")
backward(ZEROED, "stages[s].zero_grad()\n            y.backward(gradient)", blind=True)
ODD = "y.backward(gradient)\n            if m % 2:\n                stages[s].zero_grad()"
backward(ZEROED, ODD)
FIRST = "alive, losses = {}, {}\n    [stage.zero_grad() for stage in stages.values()]"
spoil(ZEROED, "alive, losses = {}, {}", FIRST, long=True)
GRAPHS = "the graph is gone"
spoil(GRAPHS, "alive[s, m] = x, y", "alive[s, m] = x, y.detach()", blind=True, alone=True)
NO_GRAD = "with torch.no_grad():\n                y = stages[s](x)"
spoil(GRAPHS, "y = stages[s](x)", NO_GRAD, alone=True)
STEP = """y.backward(gradient)
            with torch.no_grad():
                for p in stages[s].parameters():
                    p -= 0.1 * p.grad"""
backward("the weights were stepped", STEP)
popped(KEEPS, "x, y = alive[s, m]", blind=True)
popped(KEEPS, "x, y = alive[s, m]", {"return found": "alive.clear()\n    return found"}, blind=True)
KEEP = {"alive, losses = {}, {}": "alive, losses, kept = {}, {}, []"}
loss_of(KEEPS, "kept.append(y)\n                y = loss(y, ys[m])", KEEP, blind=True, long=True)
sent(KEEPS, "put(i, x.grad)\n                kept.append(x.grad)", KEEP, blind=True, long=True)
value(KEEPS, "losses[m] = y", {"return found": "return [each.detach() for each in found]"}, blind=True, long=True)
backward(KEEPS, "KEPT.append(x)\n            y.backward(gradient)", blind=True, long=True)
UNTIL = {"put(i, x.grad)": "KEPT[:] = [x]\n                put(i, x.grad)"}
returned("a name keeps a finished micro-batch", "KEPT.clear()\n    return found", UNTIL)

# ---- wrong: what of the list, and in which order ---------------------------------------------------------

todo = instead_of("for i in instructions:")
LIST, LEFT = "not in the order of the list", "something is left behind"
todo(LIST, "for i in sorted(instructions, key=lambda i: (isinstance(i, B), i.microbatch)):", blind=True, alone=True)
FIRST_IN = "right only where micro-batches come in their order"
popped(FIRST_IN, "x, y = alive.pop([*alive][0])", blind=True, alone=True)
popped(FIRST_IN, "x, y = alive.pop(next(at for at in alive if at[0] == s))", alone=True)
popped(LIST, "x, y = alive.pop([*alive][-1])", blind=True, alone=True)
SKIP = "if s == 0:\n                if s != last:\n                    take(B(1, m))\n                continue\n"
popped(LIST, SKIP + "            x, y = alive.pop((s, m))", blind=True, alone=True, long=True)
todo("part of the list is not done", "for i in instructions[:-1]:", blind=True, alone=True)
todo(LEFT, "while instructions:\n        i = instructions.pop(0)", blind=True)
returned(LEFT, "xs.clear()\n    ys.clear()\n    return found", blind=True)
spoil(LEFT, "y = stages[s](x)", "y = stages[s].eval()(x)", blind=True, long=True)
backward(LEFT, "y.backward(gradient)\n            stages[s].requires_grad_()", long=True)


@answers.wrong(alone=True, long=True)
def forwards_alone(instructions, stages, loss, xs, ys, take, put):
    if ys:
        last = max(stages)
        return [loss(stages[last](take(F(last - 1, m)) if last else xs[m]), y).item() for m, y in enumerate(ys)]
    return obey([x for x in instructions if isinstance(x, F)], stages, loss, xs, ys, take, put)
