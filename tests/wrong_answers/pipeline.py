"""Wrong answers to the exercises of notebook 10, and the right ones that they spoil."""

import torch

from labs.pp import B, F, I, W
from tests.wrong_answers.answers import wrong

# ---- right ones, which those below spoil -----------------------------------------------------------------


def gpipe(ranks, microbatches):
    every = range(microbatches)
    return [[F(rank, m) for m in every] + [B(rank, m) for m in every] for rank in range(ranks)]


def one_f_one_b(ranks, microbatches, warmup=lambda ranks, rank: ranks - 1 - rank):
    lists = []
    for rank in range(ranks):
        before = min(warmup(ranks, rank), microbatches)
        order = [F(rank, m) for m in range(before)]
        for m in range(microbatches - before):
            order += [F(rank, before + m), B(rank, m)]
        lists.append(order + [B(rank, m) for m in range(microbatches - before, microbatches)])
    return lists


def zero_bubble(ranks, microbatches, behind=lambda ranks, rank: rank):
    lists = []
    for rank, order in enumerate(one_f_one_b(ranks, microbatches)):
        new, due = [], []
        for x in order:
            if isinstance(x, F):
                new.append(x)
                continue
            new.append(I(rank, x.microbatch))
            due.append(W(rank, x.microbatch))
            if len(due) > behind(ranks, rank):
                new.append(due.pop(0))
        lists.append(new + due)
    return lists


def obey(instructions, stages, loss, xs, ys, take, put):
    last = max(stages) if ys else None
    kept, losses = {}, {}
    for instruction in instructions:
        s, m = instruction.stage, instruction.microbatch
        if isinstance(instruction, F):
            x = xs[m] if s == 0 else take(F(s - 1, m)).requires_grad_()
            y = stages[s](x)
            if s == last:
                y = loss(y, ys[m])
                losses[m] = y.detach()
                y = y / len(ys)
            else:
                put(instruction, y.detach())
            kept[s, m] = x, y
        else:
            x, y = kept.pop((s, m))
            y.backward(None if s == last else take(B(s + 1, m)))
            if s > 0:
                put(instruction, x.grad)
            del x, y
    return [losses[m] for m in sorted(losses)]


def with_each(lists, change):
    """Each instruction becomes what change(rank, instruction) says: another one, several, or none."""
    return [[new for x in order for new in change(rank, x)] for rank, order in enumerate(lists)]


def gpipe_split(ranks, microbatches):
    return [[y for x in order for y in halves(x)] for order in gpipe(ranks, microbatches)]


def halves(x):
    return [x] if isinstance(x, F) else [I(x.stage, x.microbatch), W(x.stage, x.microbatch)]


# ---- zero_bubble -----------------------------------------------------------------------------------------


@wrong("zero_bubble", "the backward is not split")
def as_1f1b(ranks, microbatches):
    return one_f_one_b(ranks, microbatches)


@wrong("zero_bubble", "W directly after its I")
def at_once(ranks, microbatches):
    return zero_bubble(ranks, microbatches, behind=lambda ranks, rank: 0)


@wrong("zero_bubble", "all W at the end")
def at_the_end(ranks, microbatches):
    return zero_bubble(ranks, microbatches, behind=lambda ranks, rank: microbatches)


@wrong("zero_bubble", "W's in the wrong places")
def two_at_a_time(ranks, microbatches):
    """Each W directly after its I, on the first rank; elsewhere an I goes by, and then two W's come."""
    return zero_bubble(ranks, microbatches, behind=lambda ranks, rank: max(0, rank - 1))


@wrong("zero_bubble", "W before its I")
def w_first(ranks, microbatches):
    def swapped(rank, x):
        return {F: [x], B: [W(rank, x.microbatch), I(rank, x.microbatch)]}[type(x)]

    return with_each(one_f_one_b(ranks, microbatches), swapped)


@wrong("zero_bubble", "a W is missing")
def without_w(ranks, microbatches):
    return with_each(zero_bubble(ranks, microbatches), lambda rank, x: [] if isinstance(x, W) else [x])


@wrong("zero_bubble", "a W is missing")
def left_over(ranks, microbatches):
    """What still waits when the loop is over."""
    return [order[: len(order) - min(r, microbatches)] for r, order in enumerate(zero_bubble(ranks, microbatches))]


@wrong("zero_bubble", "both a whole backward and a half of it")
def b_and_w(ranks, microbatches):
    return with_each(zero_bubble(ranks, microbatches), lambda rank, x: [B(rank, x.microbatch) if type(x) is I else x])


@wrong("zero_bubble", "too many activations alive")
def twice_as_long_a_warmup(ranks, microbatches):
    lists = []
    for rank, order in enumerate(one_f_one_b(ranks, microbatches, lambda ranks, rank: 2 * (ranks - 1 - rank))):
        due, new = [], []
        for x in order:
            new += halves(x)[:1]
            due += halves(x)[1:]
            new += [due.pop(0)] if len(due) > 2 * rank else []
        lists.append(new + due)
    return lists


@wrong("zero_bubble", "W's in the wrong places")
def upside_down(ranks, microbatches):
    return zero_bubble(ranks, microbatches, behind=lambda ranks, rank: ranks - 1 - rank)


@wrong("zero_bubble", "all forwards first")
def gpipe_in_halves(ranks, microbatches):
    return gpipe_split(ranks, microbatches)


@wrong("zero_bubble", "a backward is missing")
def w_alone(ranks, microbatches):
    return with_each(zero_bubble(ranks, microbatches), lambda rank, x: [] if isinstance(x, I) else [x])


# ---- obey ------------------------------------------------------------------------------------------------


def spoiled(**changed):
    """obey, in which some of its parts are other ones."""
    parts = {
        "divided": lambda y, ys, stages: y / len(ys),
        "input": lambda x: x.requires_grad_(),
        "of_xs": lambda s, xs: s == 0,
        "backward": lambda x, y, gradient: y.backward(gradient),
        "made": lambda x, gradient: x.grad,
        "sent": lambda y: y.detach(),
        "kept": lambda kept, at: kept.pop(at),
        "detached": lambda loss: loss.detach(),
        "told": lambda losses: [losses[m] for m in sorted(losses)],
        "last": lambda stages, ys: max(stages) if ys else None,
        "order": lambda instructions: instructions,
        "after": lambda stages, instruction: None,
        "late": False,
    } | changed

    def obey(instructions, stages, loss, xs, ys, take, put):
        last = parts["last"](stages, ys)
        kept, losses = {}, {}
        for instruction in parts["order"](instructions):
            s, m = instruction.stage, instruction.microbatch
            if isinstance(instruction, F):
                x = xs[m] if parts["of_xs"](s, xs) else parts["input"](take(F(s - 1, m)))
                y = stages[s](x)
                if s == last:
                    y = loss(y, ys[m])
                    losses[m] = parts["detached"](y)
                    y = parts["divided"](y, ys, stages)
                else:
                    put(instruction, parts["sent"](y))
                kept[s, m] = x, y
            else:
                x, y = parts["kept"](kept, (s, m))
                gradient = None if s == last else take(B(s + 1, m))
                if parts["late"] and s > 0:
                    put(instruction, torch.zeros_like(x))
                parts["backward"](x, y, gradient)
                if s > 0 and not parts["late"]:
                    put(instruction, parts["made"](x, gradient))
                parts["after"](stages, instruction)
                del x, y, gradient
        return parts["told"](losses)

    return obey


def needs_one(xs):
    """Where it can."""
    return [x.requires_grad_() for x in xs if x.is_floating_point()] or True


def wrong_obey(mistake, name, alone=False, listed=True, **changed):
    """alone: on one rank it raises, for which another one waits."""
    fn = spoiled(**changed)
    fn.__name__ = name
    wrong("obey", mistake, alone=alone, listed=listed)(fn)


NOT_DIVIDED = "the loss is not divided by the number of micro-batches"
wrong_obey(NOT_DIVIDED, "not_divided", divided=lambda y, ys, stages: y)
wrong_obey(
    "divided by the number of micro-batches twice",
    "divided_twice",
    divided=lambda y, ys, stages: y / len(ys) / len(ys),
)
wrong_obey(
    "divided by another number", "by_the_ranks", divided=lambda y, ys, stages: y / torch.distributed.get_world_size()
)
wrong_obey("divided by another number", "by_the_batch", divided=lambda y, ys, stages: y / len(ys) / len(ys[0]))
wrong_obey("divided by another number", "summed_over_tokens", divided=lambda y, ys, stages: y * ys[0].numel() / len(ys))
wrong_obey(
    "no gradient, or one that is not a number",
    "by_the_number_of_losses",
    divided=lambda y, ys, stages: y / (0 * len(ys)),
)
wrong_obey("the wrong gradient came back", "of_another_shape", made=lambda x, gradient: x.grad.roll(1, 0))
wrong_obey("rounded on the way", "in_bfloat16", made=lambda x, gradient: x.grad.bfloat16().to(x.dtype))
wrong_obey("no gradient to put", "no_gradient_wanted", alone=True, input=lambda x: x)
wrong_obey("put before it was done", "put_too_early", alone=True, late=True)
wrong_obey("no gradient to put", "gradient_of_the_output", alone=True, listed=False, made=lambda x, gradient: gradient)
wrong_obey(
    "the wrong gradient came back",
    "gradient_of_the_output_but_in_the_last_stage",
    made=lambda x, gradient: x.grad if gradient is None else gradient,
)
wrong_obey("put with its graph", "graph_and_all", alone=True, sent=lambda y: y)
wrong_obey("the losses are not tensors", "losses_as_numbers", detached=lambda loss: loss.item())
wrong_obey(
    "right only where micro-batches come in their order",
    "first_in_first_out",
    alone=True,
    kept=lambda kept, at: kept.pop(next(other for other in kept if other[0] == at[0])),
)
wrong_obey("something is left behind", "thaws", after=lambda stages, x: stages[x.stage].requires_grad_())
wrong_obey(
    "something is left behind",
    "used_up",
    order=lambda instructions: (instructions.pop(0) for _ in range(len(instructions))),
)
wrong_obey("retain_graph", "graph_retained", backward=lambda x, y, gradient: y.backward(gradient, retain_graph=True))
wrong_obey("activations are kept after their backward", "never_forgotten", kept=lambda kept, at: kept[at])
LAST = []
wrong_obey(
    "a name keeps a finished micro-batch",
    "named_until_the_next",
    made=lambda x, gradient: LAST.__setitem__(slice(None), [x]) or x.grad,
    told=lambda losses: LAST.clear() or [losses[m] for m in sorted(losses)],
)
wrong_obey("something is left behind", "gradients_of_what_came_in", of_xs=lambda s, xs: s == 0 and needs_one(xs))
wrong_obey("the losses keep their graphs", "losses_with_graphs", detached=lambda loss: loss)
wrong_obey("the losses are in another order", "as_they_come", told=lambda losses: list(losses.values()))
wrong_obey("no losses", "losses_lost", told=lambda losses: None)
wrong_obey("other losses", "the_mean_loss", told=lambda losses: [sum(losses.values()) / len(losses)] if losses else [])
wrong_obey(
    "the losses that are returned are divided",
    "losses_divided",
    told=lambda losses: [losses[m] / len(losses) for m in sorted(losses)],
)
wrong_obey("xs or ys of another rank", "xs_everywhere", alone=True, of_xs=lambda s, xs: True)
wrong_obey(
    "right only with one stage per rank",
    "xs_where_there_are_any",
    alone=True,
    listed=False,
    of_xs=lambda s, xs: bool(xs),
)
wrong_obey("the losses are in another order", "in_turn", told=lambda losses: list(losses.values())[::-1])
wrong_obey(
    "not in the order of the list",
    "forwards_first",
    alone=True,
    order=lambda instructions: sorted(instructions, key=lambda x: isinstance(x, B)),
)
wrong_obey(
    "part of the list is not done",
    "one_too_few",
    alone=True,
    listed=False,
    order=lambda instructions: instructions[:-1],
)


def step(stages, instruction):
    with torch.no_grad():
        for p in stages[instruction.stage].parameters():
            p -= 0.1 * p.grad


def forget(stages, instruction):
    stages[instruction.stage].zero_grad()


wrong_obey("the weights were stepped", "steps_at_once", after=step)
wrong_obey(
    "the gradients were set to zero", "zero_grad_inside", after=lambda stages, x: x.microbatch % 2 and forget(stages, x)
)


@wrong("obey", "the gradients were set to zero")
def zero_grad_first(instructions, stages, loss, xs, ys, take, put):
    for stage in stages.values():
        stage.zero_grad()
    return obey(instructions, stages, loss, xs, ys, take, put)


@wrong("obey", "not put", alone=True)
def keeps_the_gradient(instructions, stages, loss, xs, ys, take, put):
    return obey(instructions, stages, loss, xs, ys, take, lambda x, y: put(x, y) if isinstance(x, F) else None)


@wrong("obey", "put for nobody", alone=True)
def puts_the_loss(instructions, stages, loss, xs, ys, take, put):
    losses = obey(instructions, stages, loss, xs, ys, take, put)
    for m, each in enumerate(losses):
        put(F(max(stages), m), each)
    return losses


@wrong("obey", "changed after it was put", alone=True)
def clears_what_it_has_put(instructions, stages, loss, xs, ys, take, put):
    return obey(instructions, stages, loss, xs, ys, take, lambda x, y: (put(x, y), isinstance(x, B) and y.zero_()))


@wrong("obey", "not put", alone=True, listed=False)
def puts_before_it_takes(instructions, stages, loss, xs, ys, take, put):
    """As late as can be: the first rank has done all of its warm-up by then."""
    made = []

    def hand_over():
        while made:
            put(*made.pop(0))

    losses = obey(
        instructions, stages, loss, xs, ys, lambda x: (hand_over(), take(x))[1], lambda x, y: made.append((x, y))
    )
    hand_over()
    return losses


@wrong("obey", "not put", alone=True, listed=False)
def keeps_what_it_makes(instructions, stages, loss, xs, ys, take, put):
    return obey(instructions, stages, loss, xs, ys, take, lambda x, y: put(x, y) if isinstance(x, B) else None)


@wrong("obey", "something else is taken", alone=True)
def takes_its_own(instructions, stages, loss, xs, ys, take, put):
    return obey(instructions, stages, loss, xs, ys, lambda x: take(type(x)(x.stage + 1, x.microbatch)), put)


@wrong("obey", "the graph is gone", alone=True)
def without_a_graph(instructions, stages, loss, xs, ys, take, put):
    def in_vain(stage):
        def run(x):
            with torch.no_grad():
                return stage(x)

        return run

    return obey(instructions, {s: in_vain(stage) for s, stage in stages.items()}, loss, xs, ys, take, put)


@wrong("obey", "the tokens have no gradient", alone=True, listed=False)
def tokens_too(instructions, stages, loss, xs, ys, take, put):
    return obey(instructions, stages, loss, [x.requires_grad_() for x in xs], ys, take, put)


@wrong("obey", "put under the wrong name", alone=True, listed=False)
def of_the_next_stage(instructions, stages, loss, xs, ys, take, put):
    return obey(instructions, stages, loss, xs, ys, take, lambda x, y: put(type(x)(x.stage + 1, x.microbatch), y))


@wrong("obey", "put twice", alone=True, listed=False)
def sends_twice(instructions, stages, loss, xs, ys, take, put):
    return obey(instructions, stages, loss, xs, ys, take, lambda x, y: (put(x, y), put(x, y)))


@wrong("obey", "the wrong tensor is put", alone=True, listed=False)
def sends_a_pair(instructions, stages, loss, xs, ys, take, put):
    return obey(instructions, stages, loss, xs, ys, take, lambda x, y: put(x, (y, x.microbatch)))


@wrong("obey", alone=True, listed=False)
def forwards_alone(instructions, stages, loss, xs, ys, take, put):
    if ys:
        last = max(stages)
        return [loss(stages[last](take(F(last - 1, m)) if last else xs[m]), y).item() for m, y in enumerate(ys)]
    return obey([x for x in instructions if isinstance(x, F)], stages, loss, xs, ys, take, put)


@wrong("obey", "something is left behind")
def evaluates(instructions, stages, loss, xs, ys, take, put):
    for stage in stages.values():
        stage.eval()
    return obey(instructions, stages, loss, xs, ys, take, put)


@wrong("obey", "some micro-batches are weighted differently")
def divided_when_all_is_done(instructions, stages, loss, xs, ys, take, put):
    """What earlier batches have left is divided once more."""
    losses = spoiled(divided=lambda y, ys, stages: y)(instructions, stages, loss, xs, ys, take, put)
    for p in (p for stage in stages.values() for p in stage.parameters()):
        p.grad /= 1 + max(x.microbatch for x in instructions)
    return losses
