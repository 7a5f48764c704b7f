"""Wrong answers to the exercises of notebook 04, and the right ones that they spoil.

Those without a name were written without looking at the checks; they are tried in the long tests.
"""

import torch
import torch.distributed as dist
from torch import nn

from labs.group import all_gather, reduce_scatter
from tests.wrong_answers import answers


def wrong(check, mistake="", **options):
    """A wrong gather comes with a right drop, and the other way round."""
    pairs = {"gather": lambda fn: (fn, drop), "drop": lambda fn: (gather, fn)}
    exercise = "gather_and_drop" if check in pairs else check
    return answers.wrong(exercise, mistake, functions=pairs.get(check), listed=bool(mistake), **options)


def place():
    return dist.get_rank(), dist.get_world_size()


# ---- right ones, which those below spoil -----------------------------------------------------------------


def partition(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None) / ranks
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


def ready(full, shard):
    gradient, full.grad = full.grad, None
    mean = reduce_scatter(gradient, None) / dist.get_world_size()
    shard.grad = mean if shard.grad is None else shard.grad + mean


def gather(full, shard):
    full.untyped_storage().resize_(full.nbytes)
    all_gather(full.data, shard.data.to(full.dtype))


def drop(full):
    full.untyped_storage().resize_(0)


# ---- partition_optimizer ---------------------------------------------------------------------------------


@wrong("partition_optimizer", "nothing is sharded")
def partition_nothing(full, make):
    optimizer = make([full])

    def step():
        dist.all_reduce(full.grad)
        full.grad /= dist.get_world_size()
        optimizer.step()

    return step


@wrong("partition_optimizer", "the whole optimizer state is kept")
def partition_only_the_update(full, make):
    """Each rank has state for everything, and sends its own part of what comes of it."""
    rank, ranks = place()
    optimizer = make([full])

    def step():
        mine = reduce_scatter(full.grad, None) / ranks
        full.grad.chunk(ranks)[rank].copy_(mine)
        optimizer.step()
        all_gather(full.data, full.data.chunk(ranks)[rank].clone())

    return step


@wrong("partition_optimizer", "the whole optimizer state is kept")
def partition_with_an_optimizer_for_each_piece(full, make):
    rank, ranks = place()
    pieces = [nn.Parameter(piece) for piece in full.data.chunk(ranks)]
    optimizers = [make([piece]) for piece in pieces]

    def step():
        pieces[rank].grad = reduce_scatter(full.grad, None) / ranks
        optimizers[rank].step()
        all_gather(full.data, pieces[rank].data)

    return step


@wrong("partition_optimizer", "an all-reduce where a part is enough")
def partition_all_reduce_and_slice(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        dist.all_reduce(full.grad)
        shard.grad = full.grad.chunk(ranks)[rank] / ranks
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer", "summed instead of averaged")
def partition_the_sum(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None)
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer", "averaged twice")
def partition_and_average_twice(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad / ranks, None) / ranks
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer", "nothing synchronised")
def partition_the_local_gradient(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = full.grad.chunk(ranks)[rank]
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer", "nobody gathers the parameters")
def partition_and_keep_it(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None) / ranks
        optimizer.step()

    return step


@wrong("partition_optimizer", "nothing is updated")
def partition_a_copy(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank].clone())
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None) / ranks
        optimizer.step()
        all_gather(torch.empty_like(full.data), shard.data)

    return step


@wrong("partition_optimizer", "the pieces are rotated")
def partition_in_another_order(full, make):
    """Each rank takes the next one's piece, of the gradient and of the parameters; all_gather goes by rank."""
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[(rank + 1) % ranks].clone())
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad.view(ranks, -1).roll(-1, 0).reshape(-1), None) / ranks
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer", "the gradient of another piece")
def partition_with_the_neighbours_gradient(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad.view(ranks, -1).roll(1, 0).reshape(-1), None) / ranks
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer", "a new optimizer in every step")
def partition_anew(full, make):
    rank, ranks = place()

    def step():
        shard = nn.Parameter(full.data.chunk(ranks)[rank])
        shard.grad = reduce_scatter(full.grad, None) / ranks
        make([shard]).step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer", "the gradient of the step before is added again")
def partition_and_add_up(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    shard.grad = torch.zeros_like(shard)
    optimizer = make([shard])

    def step():
        shard.grad += reduce_scatter(full.grad, None) / ranks
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer", "not in place")
def partition_into_a_new_tensor(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank].clone())
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None) / ranks
        optimizer.step()
        pieces = [torch.empty_like(shard.data) for _ in range(ranks)]
        dist.all_gather(pieces, shard.data)
        full.data = torch.cat(pieces)

    return step


@wrong("partition_optimizer", "no step is returned")
def partition_and_return_the_optimizer(full, make):
    rank, ranks = place()
    return make([nn.Parameter(full.data.chunk(ranks)[rank])])


@wrong("partition_optimizer", "nobody waited")
def partition_without_waiting(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        parts = torch.empty_like(full.grad)
        dist.all_to_all_single(parts, full.grad, async_op=True)
        shard.grad = parts.view(ranks, -1).mean(0)
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer", "full copies are kept")
def partition_and_remember(full, make):
    step, before = partition(full, make), []

    def remembering():
        before[:] = [full.data.clone(), full.grad.clone()]
        step()

    return remembering


@wrong("partition_optimizer", "too many bytes")
def partition_with_state_that_travels(full, make):
    """An optimizer of its own part; but everybody hears of everybody's gradient."""
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        gradients = [torch.empty_like(full.grad) for _ in range(ranks)]
        dist.all_gather(gradients, full.grad)
        shard.grad = torch.stack(gradients).mean(0).chunk(ranks)[rank].clone()
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer", "rounded on the way")
def partition_in_float32(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = (reduce_scatter(full.grad.float(), None) / ranks).to(full.dtype)
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


# ---- gradient_ready --------------------------------------------------------------------------------------


@wrong("gradient_ready", "the whole gradient is kept")
def ready_and_keep(full, shard):
    mean = reduce_scatter(full.grad, None) / dist.get_world_size()
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready", "the whole gradient is kept")
def ready_and_zero(full, shard):
    """Right numbers, and as much memory as before."""
    mean = reduce_scatter(full.grad, None) / dist.get_world_size()
    full.grad.zero_()
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready", "the whole gradient is kept elsewhere")
def ready_and_keep_elsewhere(full, shard):
    full.kept = full.grad
    ready(full, shard)


@wrong("gradient_ready", "the whole gradient is kept elsewhere")
def ready_and_keep_a_clone(full, shard):
    ready.clones = getattr(ready, "clones", {})
    ready.clones[full] = full.grad.clone()
    ready(full, shard)


LAST = []


@wrong("gradient_ready", "freed only at the end of backward")
def ready_and_free_at_the_end(full, shard):
    """Whoever looks when backward is over finds nothing."""
    LAST.append(full.grad)
    ready(full, shard)
    if len(LAST) == 10:
        LAST.clear()


@wrong("gradient_ready", "a view keeps the whole gradient")
def ready_in_place(full, shard):
    rank, ranks = place()
    gradient, full.grad = full.grad, None
    mine = gradient.chunk(ranks)[rank]
    mine.copy_(reduce_scatter(gradient, None) / ranks)
    shard.grad = mine if shard.grad is None else shard.grad + mine


@wrong("gradient_ready", "overwritten instead of added")
def ready_and_overwrite(full, shard):
    gradient, full.grad = full.grad, None
    shard.grad = reduce_scatter(gradient, None) / dist.get_world_size()


@wrong("gradient_ready", "summed instead of averaged")
def ready_with_the_sum(full, shard):
    gradient, full.grad = full.grad, None
    total = reduce_scatter(gradient, None)
    shard.grad = total if shard.grad is None else shard.grad + total


@wrong("gradient_ready", "averaged twice")
def ready_averaged_twice(full, shard):
    full.grad /= dist.get_world_size()
    ready(full, shard)


@wrong("gradient_ready")
def ready_averaged_again_each_time(full, shard):
    gradient, full.grad = full.grad, None
    total = reduce_scatter(gradient, None)
    shard.grad = (total if shard.grad is None else shard.grad + total) / dist.get_world_size()


@wrong("gradient_ready", "nothing synchronised")
def ready_without_the_others(full, shard):
    rank, ranks = place()
    mine = full.grad.chunk(ranks)[rank].clone()
    full.grad = None
    shard.grad = mine if shard.grad is None else shard.grad + mine


@wrong("gradient_ready", "the gradient of another piece")
def ready_rotated(full, shard):
    full.grad = full.grad.view(dist.get_world_size(), -1).roll(1, 0).reshape(-1)
    ready(full, shard)


@wrong("gradient_ready", "an all-reduce where a part is enough")
def ready_all_reduce_and_slice(full, shard):
    rank, ranks = place()
    dist.all_reduce(full.grad)
    mean = full.grad.chunk(ranks)[rank] / ranks
    full.grad = None
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready", "too many bytes")
def ready_by_gathering(full, shard):
    rank, ranks = place()
    gradients = [torch.empty_like(full.grad) for _ in range(ranks)]
    dist.all_gather(gradients, full.grad)
    mean = torch.stack([gradient.chunk(ranks)[rank] for gradient in gradients]).mean(0)
    full.grad = None
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready", "a different dtype travels")
def ready_in_at_least_float32(full, shard):
    mean = reduce_scatter(full.grad.to(torch.promote_types(full.dtype, torch.float32)), None) / dist.get_world_size()
    full.grad = None
    mean = mean.to(shard.dtype)
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready", "rounded on the way")
def ready_in_bfloat16(full, shard):
    full.grad, gradient = None, full.grad.bfloat16()
    mean = (reduce_scatter(gradient, None) / dist.get_world_size()).to(shard.dtype)
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready", "the shard has no gradient")
def ready_and_return(full, shard):
    mean = reduce_scatter(full.grad, None) / dist.get_world_size()
    full.grad = None
    return mean


@wrong("gradient_ready")
def ready_in_one_buffer_for_each_size(full, shard, buffers={}):  # noqa: B006
    mean = reduce_scatter(full.grad, None) / dist.get_world_size()
    full.grad = None
    if shard.grad is None:
        shard.grad = buffers.setdefault((mean.shape, mean.dtype), torch.empty_like(mean)).copy_(mean)
    else:
        shard.grad += mean


@wrong("gradient_ready", alone=True)
def ready_where_there_is_something(full, shard):
    gradient, full.grad = full.grad, None
    if gradient.any():
        mean = reduce_scatter(gradient, None) / dist.get_world_size()
        shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready", "the parameters have changed")
def ready_and_step(full, shard):
    ready(full, shard)
    shard.data -= 0.1 * shard.grad


@wrong("gradient_ready", "nobody waited")
def ready_without_waiting(full, shard):
    parts = torch.empty_like(full.grad)
    dist.all_to_all_single(parts, full.grad, async_op=True)
    mean = parts.view(dist.get_world_size(), -1).mean(0)
    full.grad = None
    shard.grad = mean if shard.grad is None else shard.grad + mean


# ---- gather_and_drop -------------------------------------------------------------------------------------


@wrong("drop", "full parameters are never freed")
def drop_nothing(full):
    pass


@wrong("drop", "full parameters are never freed")
def drop_the_data(full):
    """Its views hold on to the old memory."""
    full.data = torch.empty(0, dtype=full.dtype)


@wrong("drop", "full parameters are never freed")
def drop_with_zeros(full):
    full.data.zero_()


@wrong("drop", "full parameters are never freed")
def drop_a_view(full):
    full.data.resize_(0)


@wrong("drop", "full parameters are never freed")
def drop_unless_there_is_a_gradient(full):
    if full.grad is None:
        drop(full)


@wrong("gather", "full has other memory")
def gather_into_new_memory(full, shard):
    pieces = [torch.empty_like(shard.data, dtype=full.dtype) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, shard.data.to(full.dtype))
    full.data = torch.cat(pieces)


@wrong("gather", "copies of full parameters are kept")
def gather_and_keep_a_copy(full, shard):
    gather(full, shard)
    full.kept = full.data.clone()


@wrong("gather", "copies of full parameters are kept")
def gather_once(full, shard):
    """What has been gathered is kept, and comes from there as long as the shard is the same."""
    if hasattr(full, "kept") and torch.equal(shard.data.to(full.dtype), full.kept.chunk(place()[1])[place()[0]]):
        full.untyped_storage().resize_(full.nbytes)
        full.data.copy_(full.kept)
    else:
        gather(full, shard)
        full.kept = full.data.clone()


@wrong("gather", "the parameters of the step before")
def gather_only_once(full, shard):
    if not hasattr(full, "kept"):
        gather(full, shard)
        full.kept = full.data.clone()
    full.untyped_storage().resize_(full.nbytes)
    full.data.copy_(full.kept)


@wrong("gather", "the compute dtype is ignored")
def gather_and_cast_after(full, shard):
    whole = torch.empty(full.shape, dtype=shard.dtype)
    all_gather(whole, shard.data)
    full.untyped_storage().resize_(full.nbytes)
    full.data.copy_(whole)


@wrong("gather", "the compute dtype is ignored")
def gather_what_the_shards_are(full, shard):
    full.untyped_storage().resize_(full.nbytes)
    if full.dtype != shard.dtype:
        full.data = torch.empty(full.shape, dtype=shard.dtype)
    all_gather(full.data, shard.data)


@wrong("gather", "the shard has changed")
def gather_rounded_shards(full, shard):
    shard.data = shard.data.to(full.dtype)
    gather(full, shard)


@wrong("gather", "the pieces are rotated")
def gather_rotated(full, shard):
    _, ranks = place()
    full.untyped_storage().resize_(full.nbytes)
    pieces = full.data.chunk(ranks)
    dist.all_gather([pieces[(i + 1) % ranks] for i in range(ranks)], shard.data.to(full.dtype))


@wrong("gather", "a piece is missing")
def gather_ones_own(full, shard):
    rank, ranks = place()
    full.untyped_storage().resize_(full.nbytes)
    full.data.fill_(float("nan"))
    full.data.chunk(ranks)[rank].copy_(shard.data)


@wrong("gather", "one's own shard everywhere")
def gather_by_repeating(full, shard):
    full.untyped_storage().resize_(full.nbytes)
    full.data.copy_(shard.data.repeat(dist.get_world_size()))


@wrong("gather", "an all-reduce where a part is enough")
def gather_by_adding_zeros(full, shard):
    rank, ranks = place()
    full.untyped_storage().resize_(full.nbytes)
    full.data.zero_()
    full.data.chunk(ranks)[rank].copy_(shard.data)
    dist.all_reduce(full.data)


@wrong("gather", "there is no memory to gather into", alone=True)
def gather_into_nothing(full, shard):
    all_gather(full.data, shard.data.to(full.dtype))


@wrong("gather", "there is no memory to gather into", alone=True)
def gather_and_copy_into_nothing(full, shard):
    whole = torch.empty(full.shape, dtype=full.dtype)
    all_gather(whole, shard.data.to(full.dtype))
    full.data.copy_(whole)


@wrong("gather", "storage of another size")
def gather_bytes_for_the_shards_dtype(full, shard):
    full.untyped_storage().resize_(full.numel() * shard.element_size())
    all_gather(full.data, shard.data.to(full.dtype))


@wrong("gather", "autograd sees the change")
def gather_as_autograd_sees(full, shard):
    whole = torch.empty(full.shape, dtype=full.dtype)
    all_gather(whole, shard.data.to(full.dtype))
    full.untyped_storage().resize_(full.nbytes)
    with torch.no_grad():
        full.copy_(whole)


@wrong("gather", "autograd sees the change")
def gather_into_a_leaf(full, shard):
    whole = torch.empty(full.shape, dtype=full.dtype)
    all_gather(whole, shard.data.to(full.dtype))
    full.untyped_storage().resize_(full.nbytes)
    full.copy_(whole)


@wrong("gather", "nobody waited")
def gather_without_waiting(full, shard):
    whole = torch.empty(full.shape, dtype=full.dtype)
    all_gather(whole, shard.data.to(full.dtype), async_op=True)
    full.untyped_storage().resize_(full.nbytes)
    full.data.copy_(whole)


@wrong("gather", "more than a layer at a time")
def gather_with_copies_on_the_way(full, shard):
    gather(full, shard)
    [full.data.clone() for _ in range(6)]


# ---- clip ------------------------------------------------------------------------------------------------


def gradients(shards):
    return [shard.grad for shard in shards if shard.grad is not None]


def global_norm(shards):
    squares = torch.stack([g.double().square().sum() for g in gradients(shards)]).sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def scale(shards, norm, max_norm):
    for g in gradients(shards):
        g *= min(1.0, max_norm / (float(norm) + 1e-6))
    return norm


@wrong("clip", "clipped by the norm of each shard")
def clip_each_shard(shards, max_norm):
    norm = global_norm(shards)
    for g in gradients(shards):
        g *= min(1.0, max_norm / (float(g.norm()) + 1e-6))
    return norm


@wrong("clip", "the norm of one rank's shards only")
def clip_each_rank(shards, max_norm):
    return nn.utils.clip_grad_norm_(shards, max_norm)


@wrong("clip", "clipped by the norm of each layer")
def clip_each_layer(shards, max_norm):
    norm = global_norm(shards)
    for shard in shards:
        if shard.grad is not None:
            scale([shard], global_norm([shard]), max_norm)
    return norm


@wrong("clip", "norms are added, and not their squares")
def clip_by_added_norms(shards, max_norm):
    norm = torch.cat(gradients(shards)).double().norm()
    dist.all_reduce(norm)
    return scale(shards, norm, max_norm)


@wrong("clip", "the norms of all shards are added")
def clip_by_all_norms_added(shards, max_norm):
    norm = sum(g.double().norm() for g in gradients(shards))
    dist.all_reduce(norm)
    return scale(shards, norm, max_norm)


@wrong("clip", "the root is missing")
def clip_by_the_squares(shards, max_norm):
    return scale(shards, global_norm(shards) ** 2, max_norm)


@wrong("clip", "the squares are averaged over the ranks")
def clip_by_averaged_squares(shards, max_norm):
    return scale(shards, global_norm(shards) / dist.get_world_size() ** 0.5, max_norm)


@wrong("clip", "small gradients are made larger")
def clip_always(shards, max_norm):
    norm = global_norm(shards)
    for g in gradients(shards):
        g *= max_norm / (norm + 1e-6)
    return norm


@wrong("clip", "nothing is clipped")
def clip_into_a_copy(shards, max_norm):
    norm = global_norm(shards)
    for g in gradients(shards):
        g = g * min(1.0, max_norm / float(norm + 1e-6))
    return norm


@wrong("clip", "more than one number travels")
def clip_with_a_number_for_each_shard(shards, max_norm):
    zero = torch.zeros((), dtype=torch.float64)
    squares = torch.stack([zero if s.grad is None else s.grad.double().square().sum() for s in shards])
    dist.all_reduce(squares)
    return scale(shards, squares.sum().sqrt(), max_norm)


@wrong("clip", "not in place")
def clip_into_new_tensors(shards, max_norm):
    norm = global_norm(shards)
    for shard in shards:
        if shard.grad is not None:
            shard.grad = shard.grad * min(1.0, max_norm / (float(norm) + 1e-6))
    return norm


@wrong("clip", "nothing is returned")
def clip_and_return_nothing(shards, max_norm):
    scale(shards, global_norm(shards), max_norm)


@wrong("clip", "the norm after clipping")
def clip_and_return_what_is_left(shards, max_norm):
    scale(shards, global_norm(shards), max_norm)
    return global_norm(shards)


@wrong("clip", "the norm of one rank's shards only")
def clip_and_return_ones_own(shards, max_norm):
    own = torch.cat(gradients(shards)).norm()
    scale(shards, global_norm(shards), max_norm)
    return own


@wrong("clip", "the gradients travel")
def clip_after_gathering(shards, max_norm):
    mine = torch.cat(gradients(shards))
    everything = torch.empty(dist.get_world_size() * mine.numel(), dtype=mine.dtype)
    all_gather(everything, mine)
    return scale(shards, everything.double().norm(), max_norm)


@wrong("clip", "zero divided by zero")
def clip_by_a_norm_of_zero(shards, max_norm):
    norm = global_norm(shards)
    for g in gradients(shards):
        g *= (max_norm * (norm / norm) / norm).clamp(max=1.0)
    return norm


@wrong("clip", "None is not None any more")
def clip_and_fill_in(shards, max_norm):
    for shard in shards:
        if shard.grad is None:
            shard.grad = torch.zeros_like(shard)
    return scale(shards, global_norm(shards), max_norm)


@wrong("clip", "the direction has changed")
def clip_the_elements(shards, max_norm):
    norm = global_norm(shards)
    bound = max_norm / float(norm + 1e-6) * max([float(g.abs().max()) for g in gradients(shards)])
    for g in gradients(shards):
        g.clamp_(-bound, bound)
    return norm


@wrong("clip", "the parameters have changed")
def clip_the_parameters(shards, max_norm):
    norm = global_norm(shards)
    for shard in shards:
        shard.data *= min(1.0, max_norm / float(norm + 1e-6))
    return norm


@wrong("clip", "scaled twice")
def clip_and_clip_again(shards, max_norm):
    norm = global_norm(shards)
    scale(shards, norm, max_norm)
    return scale(shards, norm, max_norm)


@wrong("clip", "rounded on the way")
def clip_by_squares_summed_in_bfloat16(shards, max_norm):
    squares = torch.cat([torch.zeros(0, dtype=shards[0].dtype), *gradients(shards)]).square().sum().double()
    dist.all_reduce(squares)
    return scale(shards, squares.sqrt(), max_norm)


@wrong("clip", "rounded on the way")
def clip_in_the_gradients_own_dtype(shards, max_norm):
    squares = torch.zeros((), dtype=shards[0].dtype)
    for g in gradients(shards):
        squares += g.square().sum()
    dist.all_reduce(squares)
    return scale(shards, squares.sqrt(), max_norm)


@wrong("clip", "nobody waited")
def clip_without_waiting(shards, max_norm):
    squares = torch.stack([g.double().square().sum() for g in gradients(shards)]).sum()
    dist.all_reduce(squares, async_op=True)
    return scale(shards, squares.sqrt(), max_norm)


# ---- written without looking at what the checks do: any rejection will do ---------------------------------


@wrong("partition_optimizer")
def partition_by_hand(full, make):
    """No optimizer at all."""
    rank, ranks = place()

    def step():
        mine = full.data.chunk(ranks)[rank]
        mine -= 0.1 * reduce_scatter(full.grad, None) / ranks
        all_gather(full.data, mine.clone())

    return step


@wrong("partition_optimizer")
def partition_to_rank_0(full, make):
    rank, ranks = place()
    optimizer = make([full]) if rank == 0 else None

    def step():
        dist.reduce(full.grad, 0)
        if rank == 0:
            full.grad /= ranks
            optimizer.step()
        dist.broadcast(full.data, 0)

    return step


@wrong("partition_optimizer", "synchronised at every micro-batch")
def partition_and_reduce_in_a_hook(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])
    full.register_post_accumulate_grad_hook(lambda full: ready(full, shard))

    def step():
        optimizer.step()
        shard.grad = None
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer")
def partition_with_float64_masters(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank].double())
    optimizer = make([shard])

    def step():
        shard.grad = (reduce_scatter(full.grad, None) / ranks).double()
        optimizer.step()
        all_gather(full.data, shard.data.to(full.dtype))

    return step


@wrong("partition_optimizer")
def partition_and_gather_too_early(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None) / ranks
        all_gather(full.data, shard.data)
        optimizer.step()

    return step


@wrong("partition_optimizer")
def partition_and_average_the_parameters(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None) / ranks
        optimizer.step()
        dist.all_reduce(full.data)
        full.data /= ranks

    return step


@wrong("partition_optimizer")
def partition_and_step_twice(full, make):
    rank, ranks = place()
    shard = nn.Parameter(full.data.chunk(ranks)[rank])
    optimizer = make([shard])

    def step():
        shard.grad = reduce_scatter(full.grad, None) / ranks
        optimizer.step()
        optimizer.step()
        all_gather(full.data, shard.data)

    return step


@wrong("partition_optimizer")
def partition_half_of_it(full, make):
    rank, ranks = place()
    shard = full.data.chunk(ranks)[rank]
    half = nn.Parameter(shard[: len(shard) // 2])
    optimizer = make([half])

    def step():
        half.grad = (reduce_scatter(full.grad, None) / ranks)[: len(half)]
        optimizer.step()
        all_gather(full.data, shard)

    return step


@wrong("partition_optimizer")
def partition_after_the_first_step(full, make):
    """A whole optimizer takes the first step; then its state is cut."""
    rank, ranks = place()
    shard, own = nn.Parameter(full.data.chunk(ranks)[rank]), []

    def step():
        if own:
            shard.grad = reduce_scatter(full.grad, None) / ranks
            own[0].step()
            return all_gather(full.data, shard.data)
        whole = make([full])
        dist.all_reduce(full.grad)
        full.grad /= ranks
        whole.step()
        own.append(make([shard]))
        for key, value in whole.state[full].items():
            own[0].state[shard][key] = value.chunk(ranks)[rank].clone() if value.dim() else value

    return step


@wrong("gradient_ready")
def ready_for_the_first_only(full, shard):
    gradient, full.grad = full.grad, None
    mean = reduce_scatter(gradient, None) / dist.get_world_size()
    if shard.grad is None:
        shard.grad = mean


@wrong("gradient_ready")
def ready_with_an_empty_gradient(full, shard):
    mean = reduce_scatter(full.grad, None) / dist.get_world_size()
    full.grad.untyped_storage().resize_(0)
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready")
def ready_and_keep_a_smaller_clone(full, shard):
    full.kept = full.grad.bfloat16()
    ready(full, shard)


@wrong("gradient_ready")
def ready_and_keep_what_arrived(full, shard):
    ranks = dist.get_world_size()
    full.parts = torch.empty_like(full.grad)
    dist.all_to_all_single(full.parts, full.grad)
    full.grad = None
    mean = full.parts.view(ranks, -1).mean(0)
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready")
def ready_with_its_own_twice(full, shard):
    rank, ranks = place()
    own = full.grad.chunk(ranks)[rank].clone()
    mean = (reduce_scatter(full.grad, None) + own) / ranks
    full.grad = None
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready")
def ready_every_nth_element(full, shard):
    gradient, full.grad = full.grad.view(-1, dist.get_world_size()).t().reshape(-1), None
    mean = reduce_scatter(gradient, None) / dist.get_world_size()
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready")
def ready_from_rank_0(full, shard):
    rank, ranks = place()
    gradient, full.grad = full.grad, None
    mean = torch.empty_like(shard)
    dist.reduce(gradient, 0)
    dist.scatter(mean, list(gradient.chunk(ranks)) if rank == 0 else None, 0)
    mean /= ranks
    shard.grad = mean if shard.grad is None else shard.grad + mean


@wrong("gradient_ready")
def ready_on_all_but_one(full, shard):
    gradient = full.grad
    ready(full, shard)
    if dist.get_rank() == 0:
        full.kept = gradient


@wrong("drop")
def drop_half(full):
    full.untyped_storage().resize_(full.nbytes // 2)


@wrong("drop")
def drop_the_one_before(full):
    while LAST:
        LAST.pop().untyped_storage().resize_(0)
    LAST.append(full)


@wrong("drop")
def drop_after_backward_only(full):
    if not torch.is_grad_enabled():
        drop(full)


@wrong("drop")
def drop_what_is_trained(full):
    if full.requires_grad:
        drop(full)


@wrong("gather")
def gather_what_was_cast_once(full, shard):
    if not hasattr(shard, "low"):
        shard.low = shard.data.to(full.dtype, copy=True)
    full.untyped_storage().resize_(full.nbytes)
    all_gather(full.data, shard.low)


@wrong("gather")
def gather_at_rank_0_and_tell_all(full, shard):
    rank, ranks = place()
    full.untyped_storage().resize_(full.nbytes)
    dist.gather(shard.data.to(full.dtype), list(full.data.chunk(ranks)) if rank == 0 else None, 0)
    dist.broadcast(full.data, 0)


@wrong("gather")
def gather_twice(full, shard):
    gather(full, shard)
    gather(full, shard)


@wrong("gather")
def gather_by_turns(full, shard):
    """Element by element: one of each shard, then the next."""
    gather(full, shard)
    full.data.copy_(full.data.view(dist.get_world_size(), -1).t().reshape(-1))


@wrong("gather")
def gather_and_put_the_shard_there(full, shard):
    rank, ranks = place()
    gather(full, shard)
    shard.data = full.data.chunk(ranks)[rank]


@wrong("gather")
def gather_and_forget_later(full, shard):
    gather(full, shard)
    LAST.append(full.data.clone())
    if len(LAST) == 8:
        LAST.clear()


@wrong("clip", alone=True)
def clip_where_there_are_gradients(shards, max_norm):
    return scale(shards, global_norm(shards), max_norm) if gradients(shards) else 0.0


@wrong("clip")
def clip_by_the_largest_rank(shards, max_norm):
    norm = torch.cat(gradients(shards)).double().norm()
    dist.all_reduce(norm, op=dist.ReduceOp.MAX)
    return scale(shards, norm, max_norm)


@wrong("clip")
def clip_on_rank_0(shards, max_norm):
    norm = global_norm(shards)
    return scale(shards, norm, max_norm) if dist.get_rank() == 0 else norm


@wrong("clip")
def clip_without_the_first(shards, max_norm):
    return scale(shards, global_norm(shards[1:]), max_norm)


@wrong("clip")
def clip_with_a_large_epsilon(shards, max_norm):
    norm = global_norm(shards)
    scale(shards, norm + 1, max_norm)
    return norm


@wrong("clip")
def clip_with_a_growing_sum(shards, max_norm):
    squares = torch.zeros((), dtype=torch.float64)
    for g in gradients(shards):
        squares += g.double().square().sum()
        dist.all_reduce(squares)
    return scale(shards, squares.sqrt(), max_norm)


@wrong("clip")
def clip_by_rank_0s_norm(shards, max_norm):
    norm = torch.cat(gradients(shards)).double().norm()
    dist.broadcast(norm, 0)
    return scale(shards, norm, max_norm)


@wrong("clip")
def clip_to_an_nth(shards, max_norm):
    return scale(shards, global_norm(shards), max_norm / dist.get_world_size())


# ---- stage_3 ---------------------------------------------------------------------------------------------


def forwards(layers, x):
    for layer in layers:
        layer.gather()
        x = layer.forward(x)
        layer.drop()
    return x


def one_layer_back(layer, dy):
    layer.gather()
    dy = layer.backward(dy)
    layer.reduce()
    layer.drop()
    layer.update()
    return dy


@wrong("stage_3", "layers stay whole from forward to backward")
def keeps_layers(layers, x, loss):
    for layer in layers:
        layer.gather()
        x = layer.forward(x)
    dy = loss(x)
    for layer in reversed(layers):
        dy = one_layer_back(layer, dy)


@wrong("stage_3", "layers stay whole from forward to backward")
def gathers_all_first(layers, x, loss):
    for layer in layers:
        layer.gather()
    keeps_layers(layers, x, loss)


@wrong("stage_3", "more than one layer is whole")
def gathers_the_next_one_ahead(layers, x, loss):
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        layer.gather()
        if following:
            following.gather()
        x = layer.forward(x)
        layer.drop()
    dy = loss(x)
    for layer in reversed(layers):
        dy = one_layer_back(layer, dy)


@wrong("stage_3", "a layer stays whole after the step")
def leaves_the_first_whole(layers, x, loss):
    dy = loss(forwards(layers, x))
    for layer in reversed(layers):
        dy = one_layer_back(layer, dy)
    layers[0].gather()


@wrong("stage_3", "gradients wait for each other")
def reduces_at_the_end(layers, x, loss):
    dy = loss(forwards(layers, x))
    for layer in reversed(layers):
        layer.gather()
        dy = layer.backward(dy)
        layer.drop()
    for layer in layers:
        layer.reduce()
        layer.update()


@wrong("stage_3", "gathered too often")
def gathers_for_the_update(layers, x, loss):
    dy = loss(forwards(layers, x))
    for layer in reversed(layers):
        dy = one_layer_back(layer, dy)
    for layer in layers:
        layer.gather()
        layer.drop()


@wrong("stage_3", "a layer without update()")
def forgets_to_update(layers, x, loss):
    dy = loss(forwards(layers, x))
    for layer in reversed(layers):
        layer.gather()
        dy = layer.backward(dy)
        layer.reduce()
        layer.drop()


@wrong("stage_3", "a layer without backward()")
def stops_before_the_first(layers, x, loss):
    dy = loss(forwards(layers, x))
    for layer in layers[:0:-1]:
        dy = one_layer_back(layer, dy)


@wrong("stage_3", "the list of layers has changed")
def turns_the_list(layers, x, loss):
    dy = loss(forwards(layers, x))
    layers.reverse()
    for layer in layers:
        dy = one_layer_back(layer, dy)


@wrong("stage_3", "not one process's parameters")
def backward_in_the_order_of_forward(layers, x, loss):
    dy = loss(forwards(layers, x))
    for layer in layers:
        dy = one_layer_back(layer, dy)


@wrong("stage_3", "not one process's parameters")
def every_layer_gets_the_losss_gradient(layers, x, loss):
    dy = loss(forwards(layers, x))
    for layer in reversed(layers):
        one_layer_back(layer, dy)


@wrong("stage_3", "forward runs twice")
def computes_again(layers, x, loss):
    forwards(layers[:1], x)
    dy = loss(forwards(layers, x))
    for layer in reversed(layers):
        dy = one_layer_back(layer, dy)


@wrong("stage_3", "")
def forgets_the_second_gather(layers, x, loss):
    dy = loss(forwards(layers, x))
    for layer in reversed(layers):
        dy = layer.backward(dy)
        layer.reduce()
        layer.update()
