from collections import deque
from itertools import chain

import torch

from labs.pp import B, F, I, W

NAMES = ["zero_bubble", "obey"]
RIGHT = {n: [] for n in NAMES}
WRONG = {n: [] for n in NAMES}


def right(exercise):
    def add(f):
        RIGHT[exercise].append((f.__name__, f))
        return f
    return add


def wrong(exercise):
    def add(f):
        WRONG[exercise].append((f.__name__, f))
        return f
    return add


# ================================================================ gpipe
def g_split(ranks, microbatches):  # "two kinds of instruction so far": F and B; backwards are not whole
    return [[k(r, m) for k in (F, I, W) for m in range(microbatches)] for r in range(ranks)]


# ================================================================ one_f_one_b
def o_loops(ranks, microbatches):
    lists = []
    for r in range(ranks):
        warm = min(microbatches, ranks - 1 - r)
        order = [F(r, m) for m in range(warm)]
        for m in range(microbatches - warm):
            order += [F(r, warm + m), B(r, m)]
        lists.append(order + [B(r, m) for m in range(microbatches - warm, microbatches)])
    return lists


def o_recursive(ranks, microbatches):
    def go(r, f, b):
        if b == microbatches:
            return []
        if f < microbatches and f - b < ranks - r:
            return [F(r, f), *go(r, f + 1, b)]
        return [B(r, b), *go(r, f, b + 1)]
    return [go(r, 0, 0) for r in range(ranks)]


# ================================================================ zero_bubble
def zb(p, m, late, warm=None):
    """F and I as in 1F1B; W of micro-batch i behind the I of i + late(r), those left at the end."""
    lists = []
    for r in range(p):
        w = max(0, min(m, (p - 1 - r) if warm is None else warm(r)))
        order = [F(r, i) for i in range(w)]
        for i in range(m):
            if w + i < m:
                order.append(F(r, w + i))
            order.append(I(r, i))
            if i >= late(r):
                order.append(W(r, i - late(r)))
        lists.append(order + [W(r, i) for i in range(max(0, m - late(r)), m)])
    return lists


@right("zero_bubble")
def z_late_r(ranks, microbatches):
    return zb(ranks, microbatches, lambda r: r)


@right("zero_bubble")
def z_queue(ranks, microbatches):
    lists = []
    for rank in range(ranks):
        order, waiting = [], deque()
        for x in o_loops(ranks, microbatches)[rank]:
            if isinstance(x, F):
                order.append(x)
                continue
            order.append(I(rank, x.microbatch))
            waiting.append(W(rank, x.microbatch))
            if len(waiting) > rank:
                order.append(waiting.popleft())
        lists.append(order + list(waiting))
    return lists


@right("zero_bubble")
def z_sorted(ranks, microbatches):
    lists = []
    for r in range(ranks):
        key = {}
        for m in range(microbatches):
            key[F(r, m)] = (m - (ranks - 1 - r), 0, m)
            key[I(r, m)] = (m, 1, m)
            key[W(r, m)] = (m + r, 2, m)
        lists.append(sorted(key, key=key.get))
    return lists


@right("zero_bubble")
def z_counters(ranks, microbatches):
    """A rank by itself, by what it has done so far."""
    lists = []
    for r in range(ranks):
        f = i = w = 0
        order = []
        while w < microbatches:
            if i - w > r or i == microbatches:
                order.append(W(r, w))
                w += 1
            elif f < microbatches and f - i < ranks - r:
                order.append(F(r, f))
                f += 1
            else:
                order.append(I(r, i))
                i += 1
        lists.append(order)
    return lists


@right("zero_bubble")
def z_backward_first(ranks, microbatches):
    lists = []
    for r in range(ranks):
        first = min(microbatches, ranks - r)
        order = [F(r, m) for m in range(first)]
        for m in range(microbatches):
            order.append(I(r, m))
            order += [W(r, m - r)] if m >= r else []
            order += [F(r, first + m)] if first + m < microbatches else []
        order += [W(r, m) for m in range(microbatches) if W(r, m) not in order]
        lists.append(order)
    return lists


@right("zero_bubble")
def z_insert(ranks, microbatches):
    lists = []
    for r in range(ranks):
        order = [I(r, x.microbatch) if isinstance(x, B) else x for x in o_recursive(ranks, microbatches)[r]]
        for m in range(microbatches):
            after = I(r, m + r)
            order.insert(order.index(after) + 1 if after in order else len(order), W(r, m))
        lists.append(order)
    return lists


@wrong("zero_bubble")
def z_1f1b(ranks, microbatches):  # docstring: F, I and W; the bubble
    return o_loops(ranks, microbatches)


@wrong("zero_bubble")
def z_at_once(ranks, microbatches):  # "its Ws later": the bubble
    return zb(ranks, microbatches, lambda r: 0)


@wrong("zero_bubble")
def z_all_at_end(ranks, microbatches):  # min(m, p) micro-batches at most
    return zb(ranks, microbatches, lambda r: microbatches)


@wrong("zero_bubble")
def z_r_plus_1(ranks, microbatches):  # min(m, p): one too many put off
    return zb(ranks, microbatches, lambda r: r + 1)


@wrong("zero_bubble")
def z_r_less_1(ranks, microbatches):  # the bubble: one too few put off
    return zb(ranks, microbatches, lambda r: max(0, r - 1))


@wrong("zero_bubble")
def z_mirrored(ranks, microbatches):  # the first rank puts off most, the last none
    return zb(ranks, microbatches, lambda r: ranks - 1 - r)


@wrong("zero_bubble")
def z_p_less_1(ranks, microbatches):  # min(m, p): p - 1 put off on all
    return zb(ranks, microbatches, lambda r: ranks - 1)


@wrong("zero_bubble")
def z_w_before_i(ranks, microbatches):  # "W needs its own I"
    return [[k(x.stage, x.microbatch) for x in o for k in ((W, I) if isinstance(x, B) else (F,))] for o in o_loops(ranks, microbatches)]


@wrong("zero_bubble")
def z_none_left(ranks, microbatches):  # the Ws put off are never done
    return [o[:3 * microbatches - min(r, microbatches)] for r, o in enumerate(zb(ranks, microbatches, lambda r: r))]


@wrong("zero_bubble")
def z_left_doubled(ranks, microbatches):  # a W twice
    return [[*o, W(r, microbatches - 1)] for r, o in enumerate(zb(ranks, microbatches, lambda r: r))]


@wrong("zero_bubble")
def z_b_and_w(ranks, microbatches):  # "I in place of B"
    return [[B(x.stage, x.microbatch) if isinstance(x, I) else x for x in o] for o in zb(ranks, microbatches, lambda r: r)]


@wrong("zero_bubble")
def z_negative(ranks, microbatches):  # few micro-batches: W of micro-batch -k, or lost
    lists = []
    for r in range(ranks):
        ws = [W(r, m) for m in range(microbatches)]
        order = []
        for x in o_loops(ranks, microbatches)[r]:
            if isinstance(x, F):
                order.append(x)
            else:
                order.append(I(r, x.microbatch))
                if x.microbatch >= r:
                    order.append(ws[x.microbatch - r])
        lists.append(order + (ws[-r:] if r else []) if microbatches >= r else order + ws[microbatches - r:])
    return lists


@wrong("zero_bubble")
def z_refuses_few(ranks, microbatches):  # "tries many numbers"; min(m, p)
    if microbatches < ranks:
        raise ValueError("fewer micro-batches than ranks")
    return z_late_r(ranks, microbatches)


@wrong("zero_bubble")
def z_gpipe(ranks, microbatches):  # "Write 1F1B with I in place of B": activations
    return g_split(ranks, microbatches)


@wrong("zero_bubble")
def z_h2(ranks, microbatches):  # min(m, p): ZB-H2's warm-up holds more
    return zb(ranks, microbatches, lambda r: r, lambda r: 2 * (ranks - 1 - r))


@wrong("zero_bubble")
def z_fixed_4(ranks, microbatches):  # the warm-up of 4 ranks
    return zb(ranks, microbatches, lambda r: r, lambda r: 3 - r)


@wrong("zero_bubble")
def z_stage_0(ranks, microbatches):  # W of another rank's stage
    return [[W(0, x.microbatch) if isinstance(x, W) else x for x in o] for o in z_late_r(ranks, microbatches)]


@wrong("zero_bubble")
def z_no_warm(ranks, microbatches):  # "1F1B with I in place of B": no warm-up
    return zb(ranks, microbatches, lambda r: r, lambda r: 0)


@wrong("zero_bubble")
def z_flat(ranks, microbatches):  # a list for each rank
    return list(chain.from_iterable(z_late_r(ranks, microbatches)))


@wrong("zero_bubble")
def z_no_w(ranks, microbatches):  # F, I and W: no W at all
    return [[x for x in o if not isinstance(x, W)] for o in z_late_r(ranks, microbatches)]


@wrong("zero_bubble")
def z_w_at_the_end_of_last(ranks, microbatches):  # min(m, p): the last rank does all its Ws at the end
    return zb(ranks, microbatches, lambda r: microbatches if r == ranks - 1 else r)


@wrong("zero_bubble")
def z_one_on_all_others(ranks, microbatches):  # the bubble: all put off one W at most
    return zb(ranks, microbatches, lambda r: min(r, 1))


@wrong("zero_bubble")
def z_b_where_it_can(ranks, microbatches):  # docstring: F, I and W; rank 0 does B in one piece: the same bubble?  holds less
    lists = z_late_r(ranks, microbatches)
    lists[0] = o_loops(ranks, microbatches)[0]
    return lists


@wrong("zero_bubble")
def z_i_late(ranks, microbatches):  # "its Is should come as early as possible": W of the last micro-batch before the next I
    lists = []
    for r in range(ranks):
        w = max(0, min(microbatches, ranks - 1 - r))
        order = [F(r, i) for i in range(w)]
        for i in range(microbatches):
            if w + i < microbatches:
                order.append(F(r, w + i))
            if i > 0:
                order.append(W(r, i - 1))
            order.append(I(r, i))
        lists.append(order + [W(r, microbatches - 1)])
    return lists


@wrong("zero_bubble")
def z_two_thirds(ranks, microbatches):  # few micro-batches: 1F1B with both halves one behind the other
    return (z_at_once if microbatches < ranks else z_late_r)(ranks, microbatches)


@wrong("zero_bubble")
def z_default_list(ranks, microbatches, lists=[]):  # the second call still has the first one's
    lists.extend(z_late_r(ranks, microbatches))
    return lists


# ================================================================ obey
@right("obey")
def b_notebook(instructions, stages, loss, xs, ys, take, put):
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


@right("obey")
def b_two_functions(instructions, stages, loss, xs, ys, take, put):
    """Nothing of a micro-batch in the frame that stays."""
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


@right("obey")
def b_closures(instructions, stages, loss, xs, ys, take, put):
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


@right("obey")
def b_gradient_given(instructions, stages, loss, xs, ys, take, put):
    """The division in the gradient that backward begins with."""
    alive, losses = {}, {}
    for i in instructions:
        s, m, is_last = i.stage, i.microbatch, bool(ys) and i.stage == max(stages)
        match i:
            case F():
                given = xs[m] if s == 0 else take(F(s - 1, m)).requires_grad_()
                out = stages[s](given)
                if is_last:
                    out = loss(out, ys[m])
                    losses[m] = out.detach()
                else:
                    put(i, out.detach())
                alive[s, m] = given, out
            case B():
                given, out = alive.pop((s, m))
                gradient = torch.ones_like(out) / len(ys) if is_last else take(B(s + 1, m))
                torch.autograd.backward([out], [gradient])
                if s > 0:
                    put(i, given.grad)
                given = out = gradient = None
        given = out = None
    return [losses[m] for m in sorted(losses)]


@right("obey")
def b_grad_by_hand(instructions, stages, loss, xs, ys, take, put):
    """torch.autograd.grad, and the sums by hand."""
    alive, losses = {}, {}

    def forward(s, m):
        x = xs[m] if s == 0 else take(F(s - 1, m)).requires_grad_()
        y = stages[s](x)
        if ys and s == max(stages):
            y = loss(y, ys[m])
            losses[m] = y.detach()
            y = y / len(ys)
        else:
            put(F(s, m), y.detach())
        alive[s, m] = x, y

    def backward(s, m):
        x, y = alive.pop((s, m))
        gradient = None if ys and s == max(stages) else take(B(s + 1, m))
        trained = [p for p in stages[s].parameters() if p.requires_grad]
        wanted = trained + ([x] if s > 0 else [])
        grads = torch.autograd.grad(y, wanted, gradient, allow_unused=True)
        for p, g in zip(trained, grads):
            if g is not None:
                p.grad = g.clone() if p.grad is None else p.grad + g
        if s > 0:
            put(B(s, m), grads[-1])

    for i in instructions:
        {F: forward, B: backward}[type(i)](i.stage, i.microbatch)
    return [losses[m] for m in sorted(losses)]


@right("obey")
def b_natural_locals(instructions, stages, loss, xs, ys, take, put):
    """As a learner completes the notebook's loop, without a del."""
    losses, alive = {}, {}
    for x in instructions:
        s, m = x.stage, x.microbatch
        if isinstance(x, F):
            alive[s, m], value = _fw(s, m, stages, loss, xs, ys, take, put)
            losses |= {} if value is None else {m: value}
        else:
            taken, made = alive.pop((s, m))
            if ys and s == max(stages):
                torch.autograd.backward(made, None)
            else:
                torch.autograd.backward(made, take(B(s + 1, m)))
            if s > 0:
                put(B(s, m), taken.grad)
    return [losses[m] for m in sorted(losses)]


def _fw(s, m, stages, loss, xs, ys, take, put):
    is_last = bool(ys) and s == max(stages)
    taken = xs[m] if s == 0 else take(F(s - 1, m)).requires_grad_()
    made = stages[s](taken)
    if is_last:
        value = loss(made, ys[m])
        return (taken, value / len(ys)), value.detach()
    put(F(s, m), made.detach())
    return (taken, made), None


def _obey(bug, instructions, stages, loss, xs, ys, take, put):
    """The right one, with one bug."""
    alive, losses, queue, late, counter, kept_ys = {}, {}, deque(), [], [0, 0], []
    n = len(ys)
    if bug == "default_losses":
        losses = STAYS

    def last(s):
        if bug == "last_by_ys":
            return bool(ys)
        if bug == "last_by_max":
            return s == max(stages)
        return bool(ys) and s == max(stages)

    def first(s):
        if bug == "first_by_xs":
            return bool(xs)
        if bug == "first_by_min":
            return s == min(stages)
        return s == 0

    def forward(s, m):
        if first(s):
            k = m
            if bug == "xs_in_turn":
                k, counter[0] = counter[0], counter[0] + 1
            x = xs[k]
            if bug == "xs_requires_grad":
                x = x.requires_grad_()
        else:
            x = take(F(s, m) if bug == "take_own" else F(s - 1, m))
            if bug == "bf16_taken":
                x = x.bfloat16().float()
            if bug != "no_requires_grad":
                x = x.requires_grad_()
        module = next(iter(stages.values())) if bug == "one_stage" else stages[s]
        if bug == "eval":
            module.eval()
        y = module(x)
        value = None
        if last(s):
            if bug == "put_last":
                put(F(s, m), y.detach())
            if bug == "keeps_outputs":
                kept_ys.append(y)
            k = m
            if bug == "ys_in_turn":
                k, counter[1] = counter[1], counter[1] + 1
            y = loss(y, ys[k])
            value = y.detach()
            if bug in ("losses_attached", "detached_at_end"):
                value = y
            if bug == "losses_floats":
                value = y.item()
            if bug == "losses_1dim":
                value = y.detach().reshape(1)
            if bug == "div_instructions":
                y = y / len(instructions)
            elif bug == "div_batch":
                y = y / len(ys[m])
            elif bug == "div_seen":
                y = y / (len(losses) + 1)
            elif bug == "div_stages":
                y = y / (n * (max(stages) + 1))
            elif bug not in ("not_divided", "div_at_end", "div_by_caller"):
                y = y / n
            if bug == "losses_divided":
                value = y.detach()
            if bug == "last_only_losses" and losses:
                value = None
        elif bug == "put_attached":
            put(F(s, m), y)
        elif bug == "put_input":
            put(F(s, m), x.detach())
        elif bug == "put_late":
            late.append((F(s, m), y.detach()))
        elif bug == "put_f_next":
            put(F(s + 1, m), y.detach())
        elif bug == "put_bf16":
            put(F(s, m), y.detach().bfloat16())
        elif bug == "put_twice":
            put(F(s, m), y.detach())
            put(F(s, m), y.detach())
        elif bug == "put_then_written":
            out = y.detach().clone()
            put(F(s, m), out)
            out.zero_()
        else:
            put(F(s, m), y.detach())
        if bug == "made_detached":
            y = y.detach()
        return (x, y), value

    def backward(s, m):
        if bug == "never_popped" or bug == "cleared_at_end":
            x, y = alive[s, m]
        elif bug == "fifo":
            x, y = queue.popleft()
        elif bug == "lifo":
            x, y = queue.pop()
        elif bug == "by_microbatch":
            x, y = alive.pop(m)
        else:
            x, y = alive.pop((s, m))
        if bug == "zero_each":
            for p in stages[s].parameters():
                p.grad = None
        if bug == "skips_first" and s == 0:
            take(B(1, m)) if not last(s) else None
            return
        gradient = None
        if bug == "kept_global":
            KEPT.append(x)
        if not last(s):
            gradient = take(B(s, m) if bug == "take_own_b" else B(s + 1, m))
            if bug == "ones":
                gradient = torch.ones_like(gradient)
            if bug == "div_every_stage":
                gradient = gradient / sum(isinstance(i, B) and i.stage == s for i in instructions)
        elif bug == "take_on_last":
            gradient = take(B(s + 1, m))
        torch.autograd.backward(y, gradient)
        if s == 0:
            if bug == "put_first":
                put(B(s, m), torch.zeros(1))
            return
        if bug == "put_gradient_of_output":
            put(B(s, m), torch.ones_like(x) if gradient is None else gradient)
        elif bug == "put_zeroed":
            put(B(s, m), x.grad)
            x.grad.zero_()
        elif bug == "put_b_next":
            put(B(s - 1, m), x.grad)
        elif bug == "put_taken":
            put(B(s, m), x.detach())
        elif bug == "b_late":
            late.append((B(s, m), x.grad))
        elif bug == "b_forgotten":
            pass
        elif bug == "keeps_gradients":
            put(B(s, m), x.grad)
            kept_ys.append(x.grad)
        else:
            put(B(s, m), x.grad)

    todo = instructions
    if bug == "sorted":
        todo = sorted(instructions, key=lambda i: (isinstance(i, B), i.microbatch))
    if bug == "pops_list":
        todo = iter(lambda: instructions.pop(0) if instructions else None, None)
    if bug == "drops_last":
        todo = instructions[:-1]
    for i in todo:
        s, m = i.stage, i.microbatch
        for what, tensor in late:
            if bug == "put_late":
                pass
        if isinstance(i, F):
            made, value = forward(s, m)
            if bug in ("fifo", "lifo"):
                queue.append(made)
            else:
                alive[m if bug == "by_microbatch" else (s, m)] = made
            del made
            if value is not None:
                losses[m] = value
        else:
            backward(s, m)
        if bug in ("put_late", "b_late") and len(late) > 1:
            put(*late.pop(0))
    for what, tensor in late:
        put(what, tensor)
    if bug == "div_at_end":
        for s, stage in stages.items():
            k = sum(isinstance(i, B) and i.stage == s for i in instructions)
            for p in stage.parameters():
                if p.grad is not None:
                    p.grad /= k
    if bug == "clears_xs":
        xs.clear()
        ys.clear()
    if bug == "kept_for_ever":
        KEPT.append(losses)
    if bug == "detached_at_end":
        return [losses[m].detach() for m in sorted(losses)]
    if bug == "order_computed":
        return list(losses.values())
    if bug == "none_without":
        return [losses[m] for m in sorted(losses)] or None
    if bug == "stacked":
        return torch.stack([losses[m] for m in sorted(losses)]) if losses else []
    if bug == "mean":
        return [torch.stack([losses[m] for m in sorted(losses)]).mean()] if losses else []
    if bug == "dict":
        return losses
    if bug == "no_return":
        return None
    return [losses[m] for m in sorted(losses)]


KEPT, STAYS = [], {}
BUGS = {
    "not_divided": "each loss must be divided by their number before backward",
    "div_instructions": "by the number of micro-batches, not of instructions",
    "div_batch": "by the number of micro-batches, not of sequences in one",
    "div_seen": "by the number of micro-batches, not of those seen so far",
    "div_stages": "by the number of micro-batches, not times stages",
    "div_every_stage": "each loss is divided, once; here gradients again at every stage",
    "div_at_end": "divided *before* backward; here the gradients at the end",
    "losses_divided": "losses: not divided",
    "losses_attached": "losses: detached",
    "losses_floats": "losses: 0-dim tensors",
    "losses_1dim": "losses: 0-dim tensors",
    "order_computed": "losses in the order of micro-batches",
    "last_only_losses": "its losses: all of them",
    "none_without": "[] without the last stage",
    "stacked": "its losses in a list",
    "mean": "a loss for each micro-batch",
    "dict": "a list",
    "no_return": "return its losses",
    "never_popped": "after its B nothing of a micro-batch may stay alive",
    "cleared_at_end": "after its B nothing of a micro-batch may stay alive",
    "keeps_outputs": "after its B nothing of a micro-batch may stay alive",
    "keeps_gradients": "after its B nothing of a micro-batch may stay alive",
    "fifo": "backwards in another order than forwards",
    "lifo": "the list may have its micro-batches in any order",
    "by_microbatch": "schedules of all kinds: several stages on a rank",
    "one_stage": "stages: {number: module}; stage s does F(s, m)",
    "xs_in_turn": "micro-batches in any order: xs[m]",
    "ys_in_turn": "micro-batches in any order: ys[m]",
    "last_by_ys": "ys: this rank has the last stage, and maybe others",
    "last_by_max": "ys empty where this rank has not the last stage",
    "first_by_xs": "xs: this rank has the first stage, and maybe others",
    "first_by_min": "xs empty where this rank has not the first stage",
    "no_requires_grad": "Call requires_grad_() on it",
    "take_own": "take(F(s - 1, m)) is what the stage is given",
    "take_own_b": "take(B(s + 1, m)) is the gradient of what it made",
    "take_on_last": "from a loss, with None",
    "put_attached": "Put detached tensors",
    "put_input": "put what this rank has made",
    "put_late": "put before the next instruction begins",
    "b_late": "put before the next instruction begins",
    "put_f_next": "put(F(s, m)), whose it is",
    "put_b_next": "put(B(s, m)), whose it is",
    "put_bf16": "compares losses and gradients with one process: another dtype",
    "bf16_taken": "compares losses and gradients with one process: numbers lost",
    "put_twice": "put: once",
    "put_then_written": "do not write into it any more",
    "put_zeroed": "do not write into it any more",
    "put_last": "put nothing for the last stage's F",
    "put_first": "put nothing for the first stage's B",
    "put_gradient_of_output": "B is the gradient of the stage's *input*",
    "put_taken": "B is the *gradient* of the stage's input",
    "b_forgotten": "put hands over what this rank has made",
    "ones": "goes back with the gradient that is taken",
    "made_detached": "made: what its backward begins at",
    "zero_each": "gradients of the micro-batches add up",
    "skips_first": "the first stage has a backward too",
    "sorted": "Run one rank's list, in its order",
    "pops_list": "Change nothing that you are given: the same list serves for the next batch",
    "clears_xs": "Change nothing that you are given",
    "eval": "Change nothing that you are given: .training",
    "xs_requires_grad": "Change nothing that you are given: requires_grad_() is for what is taken",
    "detached_at_end": "after its B nothing may stay alive: the loss holds its graph until the end",
    "kept_global": "after its B nothing may stay alive, not even when obey is done",
    "default_losses": "return its losses, not those of the batch before: [] without the last stage",
    "drops_last": "Run one rank's list, all of it",
}


def _make(bug):
    def obey(instructions, stages, loss, xs, ys, take, put):
        return _obey(bug, instructions, stages, loss, xs, ys, take, put)
    obey.__doc__ = BUGS.get(bug)
    obey.__qualname__ = obey.__name__ = "b_" + bug
    return obey


RIGHT["obey"].append(("b_engine_without_a_bug", _make("")))
WRONG["obey"] += [("b_" + bug, _make(bug)) for bug in BUGS]
