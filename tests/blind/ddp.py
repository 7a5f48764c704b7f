"""Right and wrong answers to the exercises of notebook 03, written without a look at the checks."""

from collections import defaultdict
from contextlib import ExitStack, nullcontext
from itertools import accumulate as running_sum
from itertools import takewhile

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from labs import ddp

BUCKET = 128 * 1024
RIGHT, WRONG = defaultdict(list), defaultdict(list)


def right(exercise):
    def keep(answer):
        RIGHT[exercise].append((answer.__name__, answer))
        return answer

    return keep


def wrong(exercise):
    def keep(answer):
        WRONG[exercise].append((answer.__name__, answer))
        return answer

    return keep


# ==== average_gradients: right ==============================================================================


@right("average_gradients")
def avg_loop(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@right("average_gradients")
def avg_divide_first(model):
    ranks = dist.get_world_size()
    for _, p in model.named_parameters():
        if p.grad is None:
            continue
        p.grad.div_(ranks)
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


@right("average_gradients")
def avg_async_all(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    works = [dist.all_reduce(g, async_op=True) for g in grads]
    for g, work in zip(grads, works, strict=True):
        work.wait()
        g.div_(dist.get_world_size())


@right("average_gradients")
def avg_one_vector_per_dtype(model):
    kinds = {}
    for p in model.parameters():
        if p.grad is not None:
            kinds.setdefault((p.grad.dtype, p.grad.device), []).append(p.grad)
    for grads in kinds.values():
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(mean.view(g.shape))


@right("average_gradients")
def avg_foreach(model):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for g in reversed(grads):
        dist.all_reduce(g)
    if grads:
        torch._foreach_div_(grads, float(dist.get_world_size()))


@right("average_gradients")
def avg_by_modules_once(model):
    seen = set()
    with torch.no_grad():
        for module in model.modules():
            for p in module.parameters(recurse=False):
                if id(p) not in seen and p.grad is not None:
                    seen.add(id(p))
                    total = p.grad.detach().clone()
                    dist.all_reduce(total)
                    p.grad.copy_(total / dist.get_world_size())


@right("average_gradients")
def avg_data_alias(model):
    for g in filter(lambda g: g is not None, (p.grad for p in model.parameters())):
        alias = g.data
        dist.all_reduce(alias)
        torch.div(alias, dist.get_world_size(), out=alias)


# ==== average_gradients: wrong ==============================================================================


@wrong("average_gradients")
def avg_sum_only(model):
    # the division is forgotten: the sum, always
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)


@wrong("average_gradients")
def avg_rebound(model):
    # not in place: p.grad is a new tensor, the old one (that others hold) has the sum
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad = p.grad / dist.get_world_size()


@wrong("average_gradients")
def avg_clone_assigned(model):
    # not in place: a clone is reduced and put into its place; who holds the old tensor sees no mean
    for p in model.parameters():
        if p.grad is not None:
            g = p.grad.clone()
            dist.all_reduce(g)
            p.grad = g.div_(dist.get_world_size())


@wrong("average_gradients")
def avg_by_four(model):
    # divisor 4: right on four ranks only
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= 4


@wrong("average_gradients")
def avg_by_two(model):
    # divisor 2: right on two ranks only
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= 2


@wrong("average_gradients")
def avg_divided_twice(model):
    # divided before and after: 1/N too small on more than one rank
    n = dist.get_world_size()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= n
            dist.all_reduce(p.grad)
            p.grad /= n


@wrong("average_gradients")
def avg_rank0_divides(model):
    # only rank 0 divides: the others keep the sum
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            if dist.get_rank() == 0:
                p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_if_trainable(model):
    # asks requires_grad and not whether there is a gradient: fails where a trainable parameter was not used
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_none_becomes_zero(model):
    # parameters without gradient get zeros (and bytes): None must stay None
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_none_sent_as_zero(model):
    # None stays None, but zeros travel for it: more bytes than one all-reduce per gradient
    for p in model.parameters():
        g = p.grad if p.grad is not None else torch.zeros_like(p)
        dist.all_reduce(g)
        g /= dist.get_world_size()


@wrong("average_gradients")
def avg_parameters(model):
    # averages the parameters, not the gradients
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.data)
                p.data /= dist.get_world_size()


@wrong("average_gradients")
def avg_all_gather(model):
    # every gradient travels whole to everybody: (N - 1) n bytes; equal to an all-reduce on 2 ranks only
    n = dist.get_world_size()
    for p in model.parameters():
        if p.grad is not None:
            parts = [torch.empty_like(p.grad) for _ in range(n)]
            dist.all_gather(parts, p.grad)
            p.grad.copy_(torch.stack(parts).mean(0))


@wrong("average_gradients")
def avg_rank0_is_server(model):
    # reduce to rank 0, which divides, and broadcast: rank 0 does the others' work
    for p in model.parameters():
        if p.grad is not None:
            dist.reduce(p.grad, dst=0)
            if dist.get_rank() == 0:
                p.grad /= dist.get_world_size()
            dist.broadcast(p.grad, src=0)


@wrong("average_gradients")
def avg_vector_float32(model):
    # one float32 vector for all: a float64 model loses half of its digits
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten().float() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(mean.view_as(g))


@wrong("average_gradients")
def avg_sent_as_double(model):
    # sums up in float64 "to be safe": twice the bytes for float32
    for p in model.parameters():
        if p.grad is not None:
            g = p.grad.double()
            dist.all_reduce(g)
            p.grad.copy_(g / dist.get_world_size())


@wrong("average_gradients")
def avg_sent_as_bfloat16(model):
    # half of the bytes, and 8 bits of mantissa: not the mean of float32 gradients
    for p in model.parameters():
        if p.grad is not None:
            g = p.grad.bfloat16()
            dist.all_reduce(g)
            p.grad.copy_(g / dist.get_world_size())


@wrong("average_gradients")
def avg_tied_twice(model):
    # a parameter with two names travels twice: too many bytes with tied weights
    for _, p in model.named_parameters(remove_duplicate=False):
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_every_module_again(model):
    # modules() and parameters() both recurse: a nested parameter travels once for each module around it
    for module in model.modules():
        for p in module.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_children_only(model):
    # only leaves right below the model: deeper ones, and the model's own parameters, stay apart
    for child in model.children():
        for p in child.parameters(recurse=False):
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_weights_only(model):
    # by name: biases and anything not called weight stay apart
    for name, p in model.named_parameters():
        if name.endswith("weight") and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_no_scalars(model):
    # `len` of a 0-dim gradient fails
    for p in model.parameters():
        if p.grad is not None and len(p.grad) > 0:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_if_training(model):
    # does nothing in evaluation mode
    if not model.training:
        return
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_tail_forgotten(model):
    # only what divides by N is averaged: the last numel % N elements stay apart
    n = dist.get_world_size()
    for p in model.parameters():
        if p.grad is not None:
            flat = p.grad.flatten()
            most = flat[: flat.numel() // n * n]
            if most.numel():
                dist.all_reduce(most)
            most /= n
            p.grad.copy_(flat.view(p.grad.shape))


@wrong("average_gradients")
def avg_reshaped_copy(model):
    # reshape copies where the gradient is not contiguous (a transposed or channels_last weight): the mean is lost
    for p in model.parameters():
        if p.grad is not None:
            flat = p.grad.reshape(-1)
            dist.all_reduce(flat)
            flat /= dist.get_world_size()


@wrong("average_gradients")
def avg_skips_zeros(model):
    # "no gradient" is taken to be a gradient of zeros: where it is zero on one rank only, calls do not match
    for p in model.parameters():
        if p.grad is not None and p.grad.any():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_first_model_only(model):
    # the list of the first call's parameters is kept: a second model is not averaged
    if not hasattr(avg_first_model_only, "parameters"):
        avg_first_model_only.parameters = list(model.parameters())
    for p in avg_first_model_only.parameters:
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_first_grads_only(model):
    # remembers the gradient tensors of the model: after zero_grad() there are others, which stay apart
    if not hasattr(model, "_grads"):
        model._grads = [p.grad for p in model.parameters() if p.grad is not None]
    for g in model._grads:
        dist.all_reduce(g)
        g /= dist.get_world_size()


def _hook(p):
    dist.all_reduce(p.grad)
    p.grad /= dist.get_world_size()


@wrong("average_gradients")
def avg_registers_hooks(model):
    # hooks for the next backward, and nothing now: this step's gradients stay apart (and hooks are left behind)
    for p in model.parameters():
        if p.requires_grad:
            p.register_post_accumulate_grad_hook(_hook)


@wrong("average_gradients")
def avg_buffers_too(model):
    # averages running statistics as well: more bytes, and buffers change
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    for b in model.buffers():
        if b.is_floating_point():
            dist.all_reduce(b)
            b /= dist.get_world_size()


@wrong("average_gradients")
def avg_whole_to_partner(model):
    # recursive doubling: n log2 N bytes, more than an all-reduce from 4 ranks on; wrong sums where N is no power of 2
    n, rank = dist.get_world_size(), dist.get_rank()
    for p in model.parameters():
        if p.grad is not None:
            distance = 1
            while distance < n:
                other, theirs = rank ^ distance, torch.empty_like(p.grad)
                if other < n:
                    works = [dist.isend(p.grad.clone(), other), dist.irecv(theirs, other)]
                    for work in works:
                        work.wait()
                    p.grad.add_(theirs)
                distance *= 2
            p.grad /= n


@wrong("average_gradients")
def avg_among_nonzero(model):
    # asks who has a gradient: a message more for each, and the mean only over ranks where it is not zero
    for p in model.parameters():
        if p.grad is not None:
            who = p.grad.any().float()
            dist.all_reduce(who)
            dist.all_reduce(p.grad)
            p.grad /= who.clamp(min=1)


@wrong("average_gradients")
def avg_one_vector_any_dtype(model):
    # one vector for all dtypes: cat promotes, so that a model of two dtypes sends more bytes than its gradients have
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for g, mean in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(mean.view_as(g))


@wrong("average_gradients")
def avg_and_clip(model):
    # clips by norm as well: wrong where the norm is above 1
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@wrong("average_gradients")
def avg_largest_first(model):
    # orders by this rank's norms: other ranks have another order, and different gradients are added up
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for g in sorted(grads, key=lambda g: -g.norm().item()):
        dist.all_reduce(g)
        g /= dist.get_world_size()


@wrong("average_gradients")
def avg_never_waits(model):
    # divides while the all-reduce is on its way (the one race)
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, async_op=True)
            p.grad /= dist.get_world_size()


# ==== accumulation: right ===================================================================================


@right("accumulation")
def acc_first_and_last(model, micro_batches):
    *first, (x_BT, y_BT) = micro_batches
    n = len(micro_batches)
    with model.no_sync():
        for x, y in first:
            (model(x, y) / n).backward()
    (model(x_BT, y_BT) / n).backward()
    model.sync()


@right("accumulation")
def acc_nullcontext(model, micro_batches):
    n = len(micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        with nullcontext() if i == n - 1 else model.no_sync():
            loss = model(x, y) / n
            loss.backward()
    model.sync()


@right("accumulation")
def acc_exit_stack(model, micro_batches):
    left = len(micro_batches)
    with ExitStack() as stack:
        stack.enter_context(model.no_sync())
        for x, y in micro_batches:
            left -= 1
            if not left:
                stack.close()
            model(x, y).div(len(micro_batches)).backward()
    model.sync()


@right("accumulation")
def acc_gradient_argument(model, micro_batches):
    share = 1 / len(micro_batches)
    for x, y in micro_batches[:-1]:
        with model.no_sync():
            loss = model(x, y)
            loss.backward(torch.full_like(loss, share, requires_grad=False))
    x, y = micro_batches[-1]
    loss = model(x, y)
    loss.backward(torch.full_like(loss, share, requires_grad=False))
    model.sync()


@right("accumulation")
def acc_divide_after_sync(model, micro_batches):
    for x, y in micro_batches[:-1]:
        with model.no_sync():
            model(x, y).backward()
    model(*micro_batches[-1]).backward()
    model.sync()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.div_(len(micro_batches))


@right("accumulation")
def acc_divide_before_last(model, micro_batches):
    n = len(micro_batches)
    with model.no_sync():
        for i in range(n - 1):
            model(*micro_batches[i]).backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(1 / n)
    (model(*micro_batches[n - 1]) * (1 / n)).backward()
    model.sync()


def _one_backward(model, batch, share):
    (share * model(*batch)).backward()


@right("accumulation")
def acc_with_helper(model, micro_batches):
    batches = iter(micro_batches)
    current, share = next(batches), 1.0 / len(micro_batches)
    for following in batches:
        with model.no_sync():
            _one_backward(model, current, share)
        current = following
    _one_backward(model, current, share)
    model.sync()


# ==== accumulation: wrong ===================================================================================


@wrong("accumulation")
def acc_no_division(model, micro_batches):
    # the sum over micro-batches: wrong from two on
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            model(x, y).backward()
    model(*micro_batches[-1]).backward()
    model.sync()


@wrong("accumulation")
def acc_by_ranks(model, micro_batches):
    # divided by the number of ranks: right only where there are as many micro-batches as ranks
    n = dist.get_world_size()
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (model(x, y) / n).backward()
    (model(*micro_batches[-1]) / n).backward()
    model.sync()


@wrong("accumulation")
def acc_by_both(model, micro_batches):
    # divided by micro-batches and ranks, and once more by ranks in sync()
    n = len(micro_batches) * dist.get_world_size()
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (model(x, y) / n).backward()
    (model(*micro_batches[-1]) / n).backward()
    model.sync()


@wrong("accumulation")
def acc_by_sequences(model, micro_batches):
    # the loss is a mean already; divided by the sequences of the micro-batch
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (model(x, y) / len(x)).backward()
    x, y = micro_batches[-1]
    (model(x, y) / len(x)).backward()
    model.sync()


@wrong("accumulation")
def acc_by_four(model, micro_batches):
    # always four micro-batches
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (model(x, y) / 4).backward()
    (model(*micro_batches[-1]) / 4).backward()
    model.sync()


@wrong("accumulation")
def acc_by_one_less(model, micro_batches):
    # divides by the number of those within no_sync (and by 1 where there is none)
    n = max(1, len(micro_batches) - 1)
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (model(x, y) / n).backward()
    (model(*micro_batches[-1]) / n).backward()
    model.sync()


@wrong("accumulation")
def acc_only_last_divided(model, micro_batches):
    # the earlier losses are not divided
    n = len(micro_batches)
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            model(x, y).backward()
    (model(*micro_batches[-1]) / n).backward()
    model.sync()


@wrong("accumulation")
def acc_without_no_sync(model, micro_batches):
    # never no_sync: buffers travel for each micro-batch, and Overlapped fails at the second backward
    for x, y in micro_batches:
        (model(x, y) / len(micro_batches)).backward()
    model.sync()


@wrong("accumulation")
def acc_forward_outside(model, micro_batches):
    # forward outside of no_sync: buffers are sent before each
    n = len(micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        loss = model(x, y) / n
        with model.no_sync() if i < n - 1 else nullcontext():
            loss.backward()
    model.sync()


@wrong("accumulation")
def acc_backward_outside(model, micro_batches):
    # only forward within no_sync: Overlapped takes every backward for the last
    n = len(micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        with model.no_sync() if i < n - 1 else nullcontext():
            loss = model(x, y) / n
        loss.backward()
    model.sync()


@wrong("accumulation")
def acc_last_inside_too(model, micro_batches):
    # the last one within no_sync as well: nothing is sent during backward, buffers not at all
    with model.no_sync():
        for x, y in micro_batches:
            (model(x, y) / len(micro_batches)).backward()
    model.sync()


@wrong("accumulation")
def acc_last_backward_inside(model, micro_batches):
    # last forward outside, but its backward within no_sync: the last backward belongs outside
    n = len(micro_batches)
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (model(x, y) / n).backward()
    loss = model(*micro_batches[-1]) / n
    with model.no_sync():
        loss.backward()
    model.sync()


@wrong("accumulation")
def acc_sync_inside(model, micro_batches):
    # sync() within no_sync does nothing: the ranks stay apart
    with model.no_sync():
        for x, y in micro_batches:
            (model(x, y) / len(micro_batches)).backward()
        model.sync()


@wrong("accumulation")
def acc_sync_forgotten(model, micro_batches):
    # no sync(): works of Overlapped are left in flight, Naive's gradients stay apart
    n = len(micro_batches)
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (model(x, y) / n).backward()
    (model(*micro_batches[-1]) / n).backward()


@wrong("accumulation")
def acc_sync_each(model, micro_batches):
    # synchronised after each micro-batch: right numbers, n times the bytes
    for x, y in micro_batches:
        (model(x, y) / len(micro_batches)).backward()
        model.sync()


@wrong("accumulation")
def acc_sync_twice(model, micro_batches):
    # a second sync(): right numbers, twice the bytes
    acc_first_and_last(model, micro_batches)
    model.sync()


@wrong("accumulation")
def acc_first_outside(model, micro_batches):
    # the first one is outside of no_sync, and not the last: Overlapped sends the first one's gradients only
    n = len(micro_batches)
    (model(*micro_batches[0]) / n).backward()
    with model.no_sync():
        for x, y in micro_batches[1:]:
            (model(x, y) / n).backward()
    model.sync()


@wrong("accumulation")
def acc_one_backward(model, micro_batches):
    # one backward of the sum of losses: activations of all micro-batches at once
    sum(model(x, y) for x, y in micro_batches).div(len(micro_batches)).backward()
    model.sync()


@wrong("accumulation")
def acc_forwards_first(model, micro_batches):
    # all forwards, then all backwards: activations of all micro-batches at once
    n = len(micro_batches)
    with model.no_sync():
        losses = [model(x, y) / n for x, y in micro_batches[:-1]]
    losses.append(model(*micro_batches[-1]) / n)
    with model.no_sync():
        for loss in losses[:-1]:
            loss.backward()
    losses[-1].backward()
    model.sync()


@wrong("accumulation")
def acc_concatenated(model, micro_batches):
    # one large batch: activations of all at once
    x, y = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    model(x, y).backward()
    model.sync()


@wrong("accumulation")
def acc_two_at_once(model, micro_batches):
    # two micro-batches in one backward: twice the activations
    n = len(micro_batches)
    early, late = micro_batches[:-2], micro_batches[-2:]
    with model.no_sync():
        for i in range(0, len(early), 2):
            sum(model(x, y) for x, y in early[i : i + 2]).div(n).backward()
        losses = [model(x, y) for x, y in late[:-1]]
    losses.append(model(*late[-1]))
    sum(losses).div(n).backward()
    model.sync()


@wrong("accumulation")
def acc_graphs_retained(model, micro_batches):
    # retain_graph, and losses kept: activations of all micro-batches at once
    n, losses = len(micro_batches), []
    for i, (x, y) in enumerate(micro_batches):
        with model.no_sync() if i < n - 1 else nullcontext():
            losses.append(model(x, y) / n)
            losses[-1].backward(retain_graph=True)
    model.sync()


@wrong("accumulation")
def acc_graph_alive_in_next_forward(model, micro_batches):
    # retain_graph and one name: the old graph lives until the next forward is over, so activations of two
    n = len(micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        with model.no_sync() if i < n - 1 else nullcontext():
            loss = model(x, y) / n
            loss.backward(retain_graph=True)
    model.sync()


@wrong("accumulation")
def acc_popped(model, micro_batches):
    # takes the last one out of the caller's list
    n = len(micro_batches)
    last = micro_batches.pop()
    with model.no_sync():
        for x, y in micro_batches:
            (model(x, y) / n).backward()
    (model(*last) / n).backward()
    model.sync()


@wrong("accumulation")
def acc_freed(model, micro_batches):
    # "frees" what it has read: the caller's list holds None afterwards
    n = len(micro_batches)
    for i in range(n):
        (x, y), micro_batches[i] = micro_batches[i], None
        with model.no_sync() if i < n - 1 else nullcontext():
            (model(x, y) / n).backward()
    model.sync()


@wrong("accumulation")
def acc_last_by_identity(model, micro_batches):
    # finds the last one by identity: where the same micro-batch is in the list twice, both are outside
    for batch in micro_batches:
        with nullcontext() if batch is micro_batches[-1] else model.no_sync():
            (model(*batch) / len(micro_batches)).backward()
    model.sync()


@wrong("accumulation")
def acc_last_dropped(model, micro_batches):
    # the last micro-batch is not read; a list of one has no backward at all
    *rest, _ = micro_batches
    for i, (x, y) in enumerate(rest):
        with model.no_sync() if i < len(rest) - 1 else nullcontext():
            (model(x, y) / len(rest)).backward()
    model.sync()


@wrong("accumulation")
def acc_zeroed_between(model, micro_batches):
    # zero_grad before each: only the last micro-batch counts
    n = len(micro_batches)
    for i, (x, y) in enumerate(micro_batches):
        model.zero_grad()
        with model.no_sync() if i < n - 1 else nullcontext():
            (model(x, y) / n).backward()
    model.sync()


@wrong("accumulation")
def acc_zeroed_after(model, micro_batches):
    # tidies up: no gradient is left for the optimizer
    acc_first_and_last(model, micro_batches)
    model.zero_grad()


@wrong("accumulation")
def acc_rank0_syncs(model, micro_batches):
    # sync() on rank 0 only: a hang with Naive, apart with others
    n = len(micro_batches)
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (model(x, y) / n).backward()
    (model(*micro_batches[-1]) / n).backward()
    if dist.get_rank() == 0:
        model.sync()


@wrong("accumulation")
def acc_gathers_batches(model, micro_batches):
    # every rank computes everything: the text travels, buffers too, and no rank has less to do
    everybodys = [None] * dist.get_world_size()
    dist.all_gather_object(everybodys, micro_batches)
    every = [batch for part in everybodys for batch in part]
    with model.no_sync():
        for x, y in every:
            (model(x, y) / len(every)).backward()


@wrong("accumulation")
def acc_frozen_fails(model, micro_batches):
    # divides p.grad of every parameter: fails where one is frozen
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            model(x, y).backward()
    model(*micro_batches[-1]).backward()
    model.sync()
    for p in model.parameters():
        p.grad /= len(micro_batches)


@wrong("accumulation")
def acc_rebound_before_sync(model, micro_batches):
    # new .grad tensors between the last backward and sync(): Overlapped's mean goes to the old ones
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            model(x, y).backward()
    model(*micro_batches[-1]).backward()
    for p in model.parameters():
        if p.grad is not None:
            p.grad = p.grad / len(micro_batches)
    model.sync()


@wrong("accumulation")
def acc_loss_shared(model, micro_batches):
    # the mean loss travels too, for a log: a message more than with one micro-batch's synchronisation
    n, total = len(micro_batches), 0.0
    for i, (x, y) in enumerate(micro_batches):
        with model.no_sync() if i < n - 1 else nullcontext():
            loss = model(x, y) / n
            loss.backward()
            total = total + loss.detach()
    dist.all_reduce(total)
    model.sync()


@wrong("accumulation")
def acc_averaged_and_summed_again(model, micro_batches):
    # after sync() the gradients are added up over the ranks once more: N times too large, twice the bytes
    acc_first_and_last(model, micro_batches)
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)


@wrong("accumulation")
def acc_eval_before_last(model, micro_batches):
    # evaluation mode "so that no running statistics change" for all but the last: another loss with dropout or norms
    n = len(micro_batches)
    before = model.training
    model.eval()
    with model.no_sync():
        for x, y in micro_batches[:-1]:
            (model(x, y) / n).backward()
    model.train(before)
    (model(*micro_batches[-1]) / n).backward()
    model.sync()


# ==== fill_buckets: right ===================================================================================


@right("fill_buckets")
def fill_room(nbytes, bucket_bytes):
    buckets, room = [], 0
    for i in reversed(range(len(nbytes))):
        if room <= 0:
            buckets.append([])
            room = bucket_bytes
        buckets[-1].append(i)
        room -= nbytes[i]
    return buckets


@right("fill_buckets")
def fill_current(nbytes, bucket_bytes):
    buckets, current, size = [], [], 0
    for i, n in reversed(list(enumerate(nbytes))):
        current.append(i)
        size += n
        if size >= bucket_bytes:
            buckets.append(current)
            current, size = [], 0
    return [*buckets, current] if current else buckets


@right("fill_buckets")
def fill_while(nbytes, bucket_bytes):
    buckets, i = [], len(nbytes) - 1
    while i >= 0:
        bucket, size = [], 0
        while i >= 0 and size < bucket_bytes:
            bucket.append(i)
            size += nbytes[i]
            i -= 1
        buckets.append(bucket)
    return buckets


@right("fill_buckets")
def fill_sum(nbytes, bucket_bytes):
    buckets = []
    for i in range(len(nbytes) - 1, -1, -1):
        if not buckets or sum(nbytes[j] for j in buckets[-1]) >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(i)
    return buckets


def _cuts(nbytes, bucket_bytes):
    """Yield a bucket at a time."""
    bucket, size = [], 0
    for place, n in zip(range(len(nbytes))[::-1], nbytes[::-1], strict=True):
        bucket, size = [*bucket, place], size + n
        if size >= bucket_bytes:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


@right("fill_buckets")
def fill_generator(nbytes, bucket_bytes):
    return list(_cuts(nbytes, bucket_bytes))


@right("fill_buckets")
def fill_by_prefix_sums(nbytes, bucket_bytes):
    total, ends = [0, *running_sum(reversed(nbytes))], []
    begin, n = 0, len(nbytes)
    for end in range(1, n + 1):
        if total[end] - total[begin] >= bucket_bytes or end == n:
            ends.append((begin, end))
            begin = end
    return [[n - 1 - k for k in range(a, b)] for a, b in ends]


# ==== fill_buckets: wrong ===================================================================================


@wrong("fill_buckets")
def fill_before_too_large(nbytes, bucket_bytes):
    # a bucket never grows beyond bucket_bytes: closes before the tensor that fills it
    buckets, size = [], 0
    for i in reversed(range(len(nbytes))):
        if not buckets or size + nbytes[i] > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += nbytes[i]
    return buckets


@wrong("fill_buckets")
def fill_exact_stays_open(nbytes, bucket_bytes):
    # > for >=: a bucket of exactly bucket_bytes stays open
    buckets, size = [], bucket_bytes + 1
    for i in reversed(range(len(nbytes))):
        if size > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += nbytes[i]
    return buckets


@wrong("fill_buckets")
def fill_first_first(nbytes, bucket_bytes):
    # begins with the first tensor
    n = len(nbytes)
    return [[n - 1 - i for i in bucket] for bucket in fill_room(list(reversed(nbytes)), bucket_bytes)]


@wrong("fill_buckets")
def fill_sorted_within(nbytes, bucket_bytes):
    # right buckets, but within each the first tensor first
    return [sorted(bucket) for bucket in fill_room(nbytes, bucket_bytes)]


@wrong("fill_buckets")
def fill_rest_dropped(nbytes, bucket_bytes):
    # the last bucket is dropped where it is not full
    buckets, current, size = [], [], 0
    for i in reversed(range(len(nbytes))):
        current.append(i)
        size += nbytes[i]
        if size >= bucket_bytes:
            buckets.append(current)
            current, size = [], 0
    return buckets


@wrong("fill_buckets")
def fill_empty_bucket_at_end(nbytes, bucket_bytes):
    # an empty bucket at the end where the last one closed full, and [[]] for no tensors
    buckets, size = [[]], 0
    for i in reversed(range(len(nbytes))):
        buckets[-1].append(i)
        size += nbytes[i]
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
    return buckets


@wrong("fill_buckets")
def fill_none_fails(nbytes, bucket_bytes):
    # right but for no tensors: [[]]
    buckets, size = [[]], 0
    for i in reversed(range(len(nbytes))):
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(i)
        size += nbytes[i]
    return buckets


@wrong("fill_buckets")
def fill_carries_over(nbytes, bucket_bytes):
    # what is over is taken to the next bucket (-=, not = 0): it closes too early
    buckets, current, size = [], [], 0
    for i in reversed(range(len(nbytes))):
        current.append(i)
        size += nbytes[i]
        if size >= bucket_bytes:
            buckets.append(current)
            current, size = [], size - bucket_bytes
    return [*buckets, current] if current else buckets


@wrong("fill_buckets")
def fill_by_running_total(nbytes, bucket_bytes):
    # the bucket of a tensor is its offset // bucket_bytes: places of the cuts drift after a large tensor
    buckets, offset = {}, 0
    for i in reversed(range(len(nbytes))):
        buckets.setdefault(offset // bucket_bytes, []).append(i)
        offset += nbytes[i]
    return list(buckets.values())


@wrong("fill_buckets")
def fill_recursive(nbytes, bucket_bytes):
    # calls itself for each tensor: fails for models of thousands of tensors
    def rest(i, bucket, size):
        if i < 0:
            return [bucket] if bucket else []
        bucket, size = [*bucket, i], size + nbytes[i]
        return [bucket, *rest(i - 1, [], 0)] if size >= bucket_bytes else rest(i - 1, bucket, size)

    return rest(len(nbytes) - 1, [], 0)


@wrong("fill_buckets")
def fill_by_value(nbytes, bucket_bytes):
    # finds places by value: two tensors of one size get the same place
    sizes = list(nbytes)
    return [[sizes.index(sizes[i]) for i in bucket] for bucket in fill_room(sizes, bucket_bytes)]


@wrong("fill_buckets")
def fill_consumes(nbytes, bucket_bytes):
    # pops from the caller's list: it is empty afterwards, and the second call finds nothing
    buckets, size = [], bucket_bytes
    while nbytes:
        n = nbytes.pop()
        if size >= bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(len(nbytes))
        size += n
    return buckets


@wrong("fill_buckets")
def fill_backwards_places(nbytes, bucket_bytes):
    # places counted from the end: the last tensor is 0
    return [[len(nbytes) - 1 - i for i in bucket] for bucket in fill_room(nbytes, bucket_bytes)]


@wrong("fill_buckets")
def fill_large_alone(nbytes, bucket_bytes):
    # a tensor that is a bucket by itself closes the one before, which was not full
    buckets, current, size = [], [], 0
    for i in reversed(range(len(nbytes))):
        if nbytes[i] >= bucket_bytes and current:
            buckets.append(current)
            current, size = [], 0
        current.append(i)
        size += nbytes[i]
        if size >= bucket_bytes:
            buckets.append(current)
            current, size = [], 0
    return [*buckets, current] if current else buckets


@wrong("fill_buckets")
def fill_evenly(nbytes, bucket_bytes):
    # as many buckets as the total needs, with equally many tensors in each
    places = list(reversed(range(len(nbytes))))
    count = max(1, -(-sum(nbytes) // bucket_bytes))
    each = max(1, -(-len(places) // count))
    return [places[i : i + each] for i in range(0, len(places), each)]


@wrong("fill_buckets")
def fill_one_bucket_below(nbytes, bucket_bytes):
    # one bucket of everything where the whole is at most twice bucket_bytes ("not worth it")
    if nbytes and sum(nbytes) <= 2 * bucket_bytes:
        return [list(reversed(range(len(nbytes))))]
    return fill_room(nbytes, bucket_bytes)


# ==== buckets: right ========================================================================================


@right("buckets")
class BktCatSplit(ddp.DataParallel):
    def average(self):
        for bucket in ddp.in_buckets(self.trainable.values(), BUCKET):
            flat = torch.cat([p.grad.flatten() for p in bucket])
            self.all_reduce(flat, group=self.group)
            flat /= self.ranks
            for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad.copy_(mean.view(p.shape))


@right("buckets")
class BktOffsets(ddp.DataParallel):
    def average(self):
        for bucket in ddp.in_buckets(self.trainable.values(), BUCKET):
            grads = [p.grad for p in bucket]
            flat = grads[0].new_empty(sum(g.numel() for g in grads))
            at = 0
            for g in grads:
                flat.narrow(0, at, g.numel()).copy_(g.reshape(-1))
                at += g.numel()
            self.all_reduce(flat, group=self.group)
            at = 0
            for g in grads:
                g.copy_(flat.narrow(0, at, g.numel()).reshape(g.shape)).div_(self.ranks)
                at += g.numel()


@right("buckets")
class BktTorchsHelpers(ddp.DataParallel):
    def average(self):
        for bucket in ddp.in_buckets(self.trainable.values(), BUCKET):
            grads = [p.grad for p in bucket]
            flat = _flatten_dense_tensors(grads)
            self.all_reduce(flat, group=self.group)
            flat.div_(self.ranks)
            for g, mean in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
                g.copy_(mean)


@right("buckets")
class BktOneBuffer(ddp.DataParallel):
    def average(self):
        buckets = ddp.in_buckets(self.trainable.values(), BUCKET)
        room = torch.empty(
            max(ddp.nbytes(b) for b in buckets), dtype=torch.uint8, device=next(iter(self.trainable.values())).device
        )
        for bucket in buckets:
            flat = room[: ddp.nbytes(bucket)].view(bucket[0].dtype)
            views = ddp.unflatten(flat, bucket)
            for view, p in zip(views, bucket, strict=True):
                view.copy_(p.grad)
            self.all_reduce(flat, group=self.group)
            flat /= self.ranks
            for view, p in zip(views, bucket, strict=True):
                p.grad.copy_(view)


@right("buckets")
class BktDivideFirst(ddp.DataParallel):
    def average(self):
        for bucket in ddp.in_buckets(self.trainable.values(), BUCKET):
            flat = torch.cat([p.grad.ravel() for p in bucket]).div_(self.ranks)
            self.all_reduce(flat, group=self.group)
            pieces = iter(flat.split([p.grad.numel() for p in bucket]))
            for p in bucket:
                p.grad.copy_(next(pieces).view_as(p))


@right("buckets")
class BktForeach(ddp.DataParallel):
    def average(self):
        every, means = [], []
        for bucket in ddp.in_buckets(self.trainable.values(), BUCKET):
            grads = [p.grad for p in bucket]
            flat = torch.cat([g.flatten() for g in grads])
            self.all_reduce(flat, group=self.group)
            every += grads
            means += ddp.unflatten(flat.div_(self.ranks), bucket)
        torch._foreach_copy_(every, means)


@right("buckets")
class BktSlices(ddp.DataParallel):
    def average(self):
        for bucket in ddp.in_buckets(list(self.trainable.values()), bucket_bytes=BUCKET):
            ends = [0, *running_sum(p.numel() for p in bucket)]
            where = {p: slice(a, b) for p, a, b in zip(bucket, ends, ends[1:], strict=False)}
            flat = torch.zeros(ends[-1], dtype=bucket[0].dtype, device=bucket[0].device)
            for p, part in where.items():
                flat[part] = p.grad.flatten()
            self.all_reduce(flat, group=self.group)
            for p, part in where.items():
                p.grad[...] = (flat[part] / self.ranks).unflatten(0, p.shape) if p.ndim else flat[part][0] / self.ranks


# ==== buckets: wrong ========================================================================================


class _Bkt(ddp.DataParallel):
    """Hooks for the wrong ones that differ in a line."""

    def flat_of(self, bucket):
        return torch.cat([p.grad.flatten() for p in bucket])

    def put_back(self, flat, bucket):
        for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad.copy_(mean.view(p.shape))

    def of_buckets(self):
        return ddp.in_buckets(self.trainable.values(), BUCKET)

    def reduce(self, flat):
        self.all_reduce(flat, group=self.group)
        flat /= self.ranks

    def average(self):
        for bucket in self.of_buckets():
            flat = self.flat_of(bucket)
            self.reduce(flat)
            self.put_back(flat, bucket)


@wrong("buckets")
class BktTorchsAllReduce(_Bkt):
    # torch's all-reduce over all ranks: wrong in a group of some ranks, or with another all_reduce
    def reduce(self, flat):
        dist.all_reduce(flat)
        flat /= self.ranks


@wrong("buckets")
class BktNotOwnAllReduce(_Bkt):
    # the group is right, but not the wrapper's own all-reduce
    def reduce(self, flat):
        dist.all_reduce(flat, group=self.group)
        flat /= self.ranks


@wrong("buckets")
class BktNoGroup(_Bkt):
    # without the group: adds up over all ranks (or hangs) where the wrapper's group is a part of them
    def reduce(self, flat):
        self.all_reduce(flat)
        flat /= self.ranks


@wrong("buckets")
class BktWorldSize(_Bkt):
    # divides by all ranks: wrong in a smaller group
    def reduce(self, flat):
        self.all_reduce(flat, group=self.group)
        flat /= dist.get_world_size()


@wrong("buckets")
class BktSum(_Bkt):
    # no division
    def reduce(self, flat):
        self.all_reduce(flat, group=self.group)


@wrong("buckets")
class BktDividedTwice(_Bkt):
    # divided before and after
    def reduce(self, flat):
        flat /= self.ranks
        self.all_reduce(flat, group=self.group)
        flat /= self.ranks


@wrong("buckets")
class BktByTensors(_Bkt):
    # divides by the number of tensors in the bucket, not by the ranks
    def average(self):
        for bucket in self.of_buckets():
            flat = self.flat_of(bucket)
            self.all_reduce(flat, group=self.group)
            flat /= len(bucket)
            self.put_back(flat, bucket)


@wrong("buckets")
class BktRebound(_Bkt):
    # .grad becomes a view of the bucket: not in place, who holds the old tensor sees no mean
    def put_back(self, flat, bucket):
        for p, mean in zip(bucket, ddp.unflatten(flat, bucket), strict=True):
            p.grad = mean


@wrong("buckets")
class BktReboundClone(_Bkt):
    # a clone is put into .grad: not in place
    def put_back(self, flat, bucket):
        for p, mean in zip(bucket, ddp.unflatten(flat, bucket), strict=True):
            p.grad = mean.clone()


@wrong("buckets")
class BktNotCopiedBack(_Bkt):
    # the mean stays in the flat tensor
    def put_back(self, flat, bucket):
        pass


@wrong("buckets")
class BktIntoParameters(_Bkt):
    # the mean is copied into the parameters
    def put_back(self, flat, bucket):
        for p, mean in zip(bucket, ddp.unflatten(flat, bucket), strict=True):
            p.data.copy_(mean)


@wrong("buckets")
class BktOnePerTensor(_Bkt):
    # an all-reduce for each tensor of the bucket
    def average(self):
        for bucket in self.of_buckets():
            for p in bucket:
                self.all_reduce(p.grad, group=self.group)
                p.grad /= self.ranks


@wrong("buckets")
class BktOneOfAll(_Bkt):
    # one all-reduce of the whole model (of each dtype): fewer messages than buckets
    def of_buckets(self):
        return ddp.in_buckets(self.trainable.values(), 2**60)


@wrong("buckets")
class BktElements(_Bkt):
    # takes bytes for elements: buckets of a quarter of the size, more messages
    def of_buckets(self):
        return ddp.in_buckets(self.trainable.values(), BUCKET // 4)


@wrong("buckets")
class BktFloat32(_Bkt):
    # float32 for everything: float64 gradients lose digits
    def flat_of(self, bucket):
        return torch.cat([p.grad.flatten().float() for p in bucket])


@wrong("buckets")
class BktFloat64(_Bkt):
    # float64 for everything: twice the bytes in float32
    def flat_of(self, bucket):
        return torch.cat([p.grad.flatten().double() for p in bucket])


@wrong("buckets")
class BktBfloat16(_Bkt):
    # bfloat16 on the way: half of the bytes, low precision
    def flat_of(self, bucket):
        return torch.cat([p.grad.flatten().bfloat16() for p in bucket])


@wrong("buckets")
class BktDefaultDtype(_Bkt):
    # a buffer of torch's default dtype: a float64 model is rounded to float32
    def flat_of(self, bucket):
        flat = torch.empty(sum(p.numel() for p in bucket))
        for view, p in zip(ddp.unflatten(flat, bucket), bucket, strict=True):
            view.copy_(p.grad)
        return flat


@wrong("buckets")
class BktMixedDtypes(_Bkt):
    # own buckets without regard to dtype: cat promotes, more bytes for a model of two dtypes, and other buckets
    def of_buckets(self):
        parameters = list(self.trainable.values())
        return [[parameters[i] for i in b] for b in fill_room([p.nbytes for p in parameters], BUCKET)]


@wrong("buckets")
class BktScalarsFail(_Bkt):
    # sizes by the product of shape[0] and the rest: fails for a 0-dim parameter
    def put_back(self, flat, bucket):
        sizes = [p.shape[0] * p[0].numel() for p in bucket]
        for p, mean in zip(bucket, flat.split(sizes), strict=True):
            p.grad.copy_(mean.view(p.shape))


@wrong("buckets")
class BktOrderTurned(_Bkt):
    # laid out in the bucket's order, taken out in the model's: others' gradients, where shapes differ
    def put_back(self, flat, bucket):
        super().put_back(flat, bucket[::-1])


@wrong("buckets")
class BktTransposed(_Bkt):
    # matrices are laid out column by column, and read row by row
    def flat_of(self, bucket):
        return torch.cat([(p.grad.mT if p.ndim > 1 else p.grad).flatten() for p in bucket])


@wrong("buckets")
class BktStaleGradients(_Bkt):
    # remembers the tensors of the first step: after zero_grad() there are new ones, which stay apart
    def average(self):
        if not hasattr(self, "held"):
            self.held = [[p.grad for p in bucket] for bucket in self.of_buckets()]
        for grads in self.held:
            flat = torch.cat([g.flatten() for g in grads])
            self.reduce(flat)
            for g, mean in zip(grads, ddp.unflatten(flat, grads), strict=True):
                g.copy_(mean)


@wrong("buckets")
class BktSharedCache(_Bkt):
    # buckets cached in the class: a second wrapper averages the first one's parameters
    cache = None

    def of_buckets(self):
        if BktSharedCache.cache is None:
            BktSharedCache.cache = super().of_buckets()
        return BktSharedCache.cache


@wrong("buckets")
class BktPaddedToFull(_Bkt):
    # every bucket is padded to BUCKET bytes: more bytes than the gradients have
    def average(self):
        for bucket in self.of_buckets():
            flat = self.flat_of(bucket)
            n = flat.numel()
            flat = torch.cat([flat, flat.new_zeros(max(0, BUCKET // flat.element_size() - n))])
            self.reduce(flat)
            self.put_back(flat[:n], bucket)


@wrong("buckets")
class BktCountRanks(_Bkt):
    # one number more in each bucket, to count the ranks: more bytes
    def average(self):
        for bucket in self.of_buckets():
            flat = self.flat_of(bucket)
            flat = torch.cat([flat, flat.new_ones(1)])
            self.all_reduce(flat, group=self.group)
            self.put_back(flat[:-1] / flat[-1], bucket)


@wrong("buckets")
class BktLastForgotten(_Bkt):
    # the last bucket (the first layers) is left out
    def of_buckets(self):
        return super().of_buckets()[:-1]


@wrong("buckets")
class BktFirstOnly(_Bkt):
    # returns within the loop: only one bucket
    def average(self):
        for bucket in self.of_buckets():
            flat = self.flat_of(bucket)
            self.reduce(flat)
            self.put_back(flat, bucket)
            return


@wrong("buckets")
class BktAloneUndivided(_Bkt):
    # a bucket of one tensor needs no copy, but a division, which is forgotten there
    def average(self):
        for bucket in self.of_buckets():
            if len(bucket) == 1:
                self.all_reduce(bucket[0].grad, group=self.group)
                continue
            flat = self.flat_of(bucket)
            self.reduce(flat)
            self.put_back(flat, bucket)


@wrong("buckets")
class BktFrozenToo(_Bkt):
    # all parameters of the module: fails where one is frozen and has no gradient
    def of_buckets(self):
        return ddp.in_buckets(self.module.parameters(), BUCKET)


@wrong("buckets")
class BktConsumes(_Bkt):
    # empties the wrapper's `trainable`: the second step fails or averages nothing
    def of_buckets(self):
        parameters = []
        while self.trainable:
            parameters.insert(0, self.trainable.popitem()[1])
        return ddp.in_buckets(parameters, BUCKET)


@wrong("buckets")
class BktGathers(_Bkt):
    # all_gather and mean: more bytes from three ranks on, and no all-reduce
    def reduce(self, flat):
        parts = [torch.empty_like(flat) for _ in range(self.ranks)]
        dist.all_gather(parts, flat, group=self.group)
        flat.copy_(torch.stack(parts).mean(0))


@wrong("buckets")
class BktIfTraining(_Bkt):
    # nothing in evaluation mode (a fine-tuning with frozen norms trains in it): gradients stay apart
    def average(self):
        if self.training:
            super().average()


@wrong("buckets")
class BktSkipsZeros(_Bkt):
    # a bucket of zeros is not sent: a rank whose gradients are zero there does not take part, and the others wait
    def average(self):
        for bucket in self.of_buckets():
            flat = self.flat_of(bucket)
            if flat.any():
                self.reduce(flat)
                self.put_back(flat, bucket)


# ==== overlap: right ========================================================================================


@right("overlap")
class OvCourse(ddp.Overlapped):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()

    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                break
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@right("overlap")
class OvWhile(ddp.Overlapped):
    def gradient_ready(self, p):
        self.bucket_of[p].collect(p)
        if not self.syncing:
            return
        self.bucket_of[p].waiting_for.discard(p)
        self.start_full_buckets()

    def start_full_buckets(self):
        while len(self.works) < len(self.buckets) and not self.buckets[len(self.works)].waiting_for:
            flat = self.buckets[len(self.works)].flat
            self.works.append(self.all_reduce(flat, group=self.group, async_op=True))


@right("overlap")
class OvTakeWhile(ddp.Overlapped):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for = bucket.waiting_for - {p}
            if not bucket.waiting_for:  # nothing can have become full otherwise
                self.start_full_buckets()

    def start_full_buckets(self):
        rest = self.buckets[len(self.works) :]
        full = list(takewhile(lambda bucket: not bucket.waiting_for, rest))
        self.works += [self.all_reduce(bucket.flat, group=self.group, async_op=True) for bucket in full]


@right("overlap")
class OvPrefix(ddp.Overlapped):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        if p.grad is not bucket.views[p]:  # it lives there already after an earlier micro-batch
            bucket.collect(p)
        if self.syncing:
            bucket.waiting_for -= {p}
            self.start_full_buckets()

    def start_full_buckets(self):
        first_open = next((i for i, b in enumerate(self.buckets) if b.waiting_for), len(self.buckets))
        for i in range(len(self.works), first_open):
            self.works.append(self.all_reduce(self.buckets[i].flat, group=self.group, async_op=True))


@right("overlap")
class OvOnlyIfItsTurn(ddp.Overlapped):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        if self.syncing and p not in bucket.waiting_for:
            raise RuntimeError("a second backward before sync()")
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            if bucket is self.buckets[len(self.works)]:
                self.start_full_buckets()

    def start_full_buckets(self):
        for i, bucket in enumerate(self.buckets):
            if i < len(self.works):
                continue
            if len(bucket.waiting_for) > 0:
                return
            work = self.all_reduce(bucket.flat, group=self.group, async_op=True)
            self.works.append(work)


@right("overlap")
class OvIterator(ddp.Overlapped):
    def gradient_ready(self, p):
        (bucket := self.bucket_of[p]).collect(p)
        if self.syncing:
            bucket.waiting_for.difference_update((p,))
            self.start_full_buckets()

    def next_full(self):
        begun = len(self.works)
        if begun < len(self.buckets) and not self.buckets[begun].waiting_for:
            return self.buckets[begun]
        return None

    def start_full_buckets(self):
        while (bucket := self.next_full()) is not None:
            self.works = [*self.works, self.all_reduce(bucket.flat, group=self.group, async_op=True)]


# ==== overlap: wrong ========================================================================================


@wrong("overlap")
class OvAnyFull(OvCourse):
    # whichever bucket is full begins: where gradients come in another order on another rank, the wrong ones meet
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            if not bucket.waiting_for:
                self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvContinue(OvCourse):
    # `continue` at a bucket that is not full: later ones overtake it, then it is never begun, or another one twice
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                continue
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvNotHeldOnce(OvCourse):
    # within no_sync it does not collect: gradients lie outside of the buckets, held twice
    def gradient_ready(self, p):
        if not self.syncing:
            return
        super().gradient_ready(p)


@wrong("overlap")
class OvReadyTooEarly(OvCourse):
    # within no_sync parameters are crossed off, too: in the last backward all buckets begin at its first gradient
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        bucket.waiting_for.discard(p)
        if self.syncing:
            self.start_full_buckets()


@wrong("overlap")
class OvRemovedTwice(OvCourse):
    # the same with `remove`: KeyError at the second micro-batch
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        bucket.waiting_for.remove(p)
        if self.syncing:
            self.start_full_buckets()


@wrong("overlap")
class OvSendsInNoSync(OvCourse):
    # does not look at self.syncing: sends in every micro-batch (and fails in the second)
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        bucket.waiting_for.remove(p)
        self.start_full_buckets()


@wrong("overlap")
class OvInverted(OvCourse):
    # the condition the wrong way round: sends within no_sync, and not outside
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if not self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()


@wrong("overlap")
class OvWaitsAtOnce(OvCourse):
    # waits for each all-reduce in backward
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            work = self.all_reduce(bucket.flat, group=self.group, async_op=True)
            work.wait()
            self.works.append(work)


@wrong("overlap")
class OvWaitsForTheOneBefore(OvCourse):
    # one on its way at a time: before it begins the next it waits for the last one, in backward
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            if self.works:
                self.works[-1].wait()
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


class _Done:
    def wait(self):
        return True


@wrong("overlap")
class OvNotAsync(OvCourse):
    # without async_op: backward waits for every all-reduce
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.all_reduce(bucket.flat, group=self.group)
            self.works.append(_Done())


@wrong("overlap")
class OvBarrier(OvCourse):
    # a barrier before each, so that nobody is early: everybody waits in backward
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            dist.barrier(group=self.group)
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvNoGroup(OvCourse):
    # without the group: wrong, or a hang, where the wrapper's group is not all ranks
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, async_op=True))


@wrong("overlap")
class OvTorchsAllReduce(OvCourse):
    # torch's all-reduce, not the wrapper's own
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvOneAtATime(OvCourse):
    # begins at most one bucket: those that were full before their turn begin too late, or never
    def start_full_buckets(self):
        begun = len(self.works)
        if begun < len(self.buckets) and not self.buckets[begun].waiting_for:
            self.works.append(self.all_reduce(self.buckets[begun].flat, group=self.group, async_op=True))


@wrong("overlap")
class OvOnlyItsOwn(OvCourse):
    # begins p's bucket if it is its turn, and forgets those that were full before: they are never begun
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            if not bucket.waiting_for and self.buckets.index(bucket) == len(self.works):
                self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvAllAtTheEnd(OvCourse):
    # begins only when all buckets are full: no overlap
    def start_full_buckets(self):
        if any(bucket.waiting_for for bucket in self.buckets):
            return
        for bucket in self.buckets:
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvOneBucketLate(OvCourse):
    # a bucket begins only when the next one is full, too; not as soon as it may
    def start_full_buckets(self):
        last = len(self.buckets) - 1
        for i in range(len(self.works), len(self.buckets)):
            if self.buckets[i].waiting_for or self.buckets[min(i + 1, last)].waiting_for:
                return
            self.works.append(self.all_reduce(self.buckets[i].flat, group=self.group, async_op=True))


@wrong("overlap")
class OvAgainFromTheFirst(OvCourse):
    # begins all full buckets at every call: those that are on their way, too
    def start_full_buckets(self):
        for bucket in self.buckets:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvBackwards(OvCourse):
    # the first layer's bucket first: nothing begins until the very end of backward
    def start_full_buckets(self):
        for bucket in self.buckets[::-1][len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvDivides(OvCourse):
    # divides, too: sync() does it again
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            bucket.flat /= self.ranks
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvOneMissing(OvCourse):
    # off by one: begins while one gradient is still missing
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if len(bucket.waiting_for) > 1:
                return
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvLastForgotten(OvCourse):
    # the last bucket is never begun
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) : -1]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvOneStepOnly(OvCourse):
    # counts what has begun in an attribute that nobody sets back: nothing is begun in the second step
    begun = 0

    def start_full_buckets(self):
        for bucket in self.buckets[self.begun :]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))
            self.begun += 1


@wrong("overlap")
class OvBucketsUsedUp(OvCourse):
    # takes begun buckets out of self.buckets: sync() and the second step find none
    def start_full_buckets(self):
        while self.buckets and not self.buckets[0].waiting_for:
            bucket = self.buckets.pop(0)
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap")
class OvCollectsLate(OvCourse):
    # begins, and then collects: the last gradient of each bucket is not in it when it sets out
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        if self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()
        bucket.collect(p)


@wrong("overlap")
class OvCopyOnly(OvCourse):
    # copies the gradient into the bucket, but .grad does not become a view of it: the mean never gets there
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.views[p].copy_(p.grad)
        if self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()


@wrong("overlap")
class OvAddsUp(OvCourse):
    # adds .grad to what is in the bucket: there is the step before, and with micro-batches .grad itself
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.views[p].add_(p.grad)
        p.grad = bucket.views[p]
        if self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()


@wrong("overlap")
class OvGradGone(OvCourse):
    # .grad is taken away after the copy: the optimizer finds none
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        p.grad = None
        if self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()


@wrong("overlap")
class OvParameter(OvCourse):
    # takes p for the gradient: averages the parameter
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.views[p].copy_(p.detach())
        p.grad = bucket.views[p]
        if self.syncing:
            bucket.waiting_for.remove(p)
            self.start_full_buckets()


@wrong("overlap")
class OvReducesACopy(OvCourse):
    # the copy is reduced, and the bucket keeps this rank's gradients
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat.clone(), group=self.group, async_op=True))


class _Both:
    def __init__(self, *works):
        self.works = works

    def wait(self):
        for work in self.works:
            work.wait()


@wrong("overlap")
class OvTwoHalves(OvCourse):
    # two all-reduces for each bucket: twice as many as buckets
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            halves = bucket.flat.tensor_split(2)
            self.works.append(_Both(*(self.all_reduce(x, group=self.group, async_op=True) for x in halves)))


@wrong("overlap")
class OvOnePerGradient(OvCourse):
    # an all-reduce for each gradient, as soon as it is there: as many as tensors, and in no order
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            parts = self.__dict__.setdefault("parts", {})
            work = self.all_reduce(bucket.views[p], group=self.group, async_op=True)
            parts.setdefault(bucket, []).append(work)
            if not any(b.waiting_for for b in self.buckets):
                self.works = [_Both(*parts.pop(b)) for b in self.buckets]


@wrong("overlap")
class OvSyncsItself(OvCourse):
    # waits at the end of backward, as PyTorch's does, for all works: somebody waits in backward
    def gradient_ready(self, p):
        super().gradient_ready(p)
        if len(self.works) == len(self.buckets):
            for work in self.works:
                work.wait()


@wrong("overlap")
class OvSkipsZeros(OvCourse):
    # a gradient of zeros is passed over as if unused: its bucket is never full, also not in sync()
    def gradient_ready(self, p):
        if not p.grad.any():
            return
        super().gradient_ready(p)


@wrong("overlap")
class OvRankZeroOnly(OvCourse):
    # a collective on one rank only
    def start_full_buckets(self):
        if dist.get_rank(self.group) == 0:
            super().start_full_buckets()


@wrong("overlap")
class OvAgreesFirst(OvCourse):
    # asks the other ranks whether they are ready, with an all-reduce more for each bucket, and waits for the answer
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            ready = torch.ones((), device=bucket.flat.device)
            self.all_reduce(ready, group=self.group)
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


# ==== started_when ==========================================================================================


@right("started_when")
def when_literal(tensors, buckets):
    return {"Naive": (0, tensors), "Bucketed": (0, buckets), "Overlapped": (buckets, 0)}


@right("started_when")
def when_dict(tensors, buckets):
    by_backward = dict(Naive=0, Bucketed=0, Overlapped=buckets)
    in_all = dict(Naive=tensors, Bucketed=buckets, Overlapped=buckets)
    return {way: (n, in_all[way] - n) for way, n in by_backward.items()}


@right("started_when")
def when_zip(tensors, buckets):
    ways = ("Naive", "Bucketed", "Overlapped")
    return dict(zip(ways, zip((0, 0, buckets), (tensors, buckets, 0), strict=True), strict=True))


@right("started_when")
def when_step_by_step(tensors, buckets):
    answer = {}
    for way in ("Overlapped", "Bucketed", "Naive"):
        count = tensors if way == "Naive" else buckets
        answer[way] = (count, 0) if way == "Overlapped" else (0, count)
    return answer


@wrong("started_when")
def when_swapped(tensors, buckets):
    # (sync, backward): the pairs the wrong way round
    return {"Naive": (tensors, 0), "Bucketed": (buckets, 0), "Overlapped": (0, buckets)}


@wrong("started_when")
def when_last_by_sync(tensors, buckets):
    # "the last one has nothing to hide behind": but backward begins it, too
    return {"Naive": (0, tensors), "Bucketed": (0, buckets), "Overlapped": (buckets - 1, 1)}


@wrong("started_when")
def when_overlapped_tensors(tensors, buckets):
    # Overlapped has buckets as well; a hook is called for each tensor, but not an all-reduce
    return {"Naive": (0, tensors), "Bucketed": (0, buckets), "Overlapped": (tensors, 0)}


@wrong("started_when")
def when_bucketed_in_backward(tensors, buckets):
    # Bucketed begins none in backward
    return {"Naive": (0, tensors), "Bucketed": (buckets, 0), "Overlapped": (buckets, 0)}


@wrong("started_when")
def when_naive_in_backward(tensors, buckets):
    # Naive begins none in backward
    return {"Naive": (tensors, 0), "Bucketed": (0, buckets), "Overlapped": (buckets, 0)}


@wrong("started_when")
def when_this_model(tensors, buckets):
    # the numbers of this notebook's model
    return {"Naive": (0, 39), "Bucketed": (0, 6), "Overlapped": (6, 0)}


@wrong("started_when")
def when_waits_count(tensors, buckets):
    # takes the waits of sync() for all-reduces
    return {"Naive": (0, tensors), "Bucketed": (0, buckets), "Overlapped": (buckets, buckets)}


@wrong("started_when")
def when_bucketed_is_one(tensors, buckets):
    # Bucketed: everything in one all-reduce
    return {"Naive": (0, tensors), "Bucketed": (0, 1), "Overlapped": (buckets, 0)}


@wrong("started_when")
def when_copy_per_tensor(tensors, buckets):
    # Bucketed copies each tensor, but reduces each bucket
    return {"Naive": (0, tensors), "Bucketed": (0, tensors), "Overlapped": (buckets, 0)}


@wrong("started_when")
def when_numbers_exchanged(tensors, buckets):
    # tensors and buckets exchanged
    return {"Naive": (0, buckets), "Bucketed": (0, tensors), "Overlapped": (tensors, 0)}


RIGHT, WRONG = dict(RIGHT), dict(WRONG)
