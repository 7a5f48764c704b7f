"""Saved activations of a tensor-parallel rank, and the bytes alive while its backward runs.

The formulas are those of `labs.cost.saved_activations` for the rank's share, plus the tensors that cross the borders
of split layers.

    split_activations(job)      saved activations, term by term
    split_backward(job)         bytes alive in backward, part after part

The job describes a single rank: its config is a `labs.cost.split.Share`.
"""

from collections.abc import Iterator
from dataclasses import replace

from labs.cost.job import Job
from labs.cost.model_states import FLOAT, INDEX, Moment, gpt_layers
from labs.cost.saved_activations import (
    Part,
    Within,
    activations,
    backward,
    layer_activations,
    layer_terms,
    norm_bytes,
    within_layer,
    within_norm,
)
from labs.cost.split import Share


def split_activations(job: Job) -> dict[str, int]:
    """Return the bytes of each term of `activations`.

    If the sequence is cut, norms save shards, but inputs of split layers are whole.  Instead of tokens and targets, a
    rank saves for each token:

        embedding    the token's row in the rank's part, as int64, and one byte: whether the rank has that row
        loss         the same for the target, and one byte: whether the target counts
    """
    here = job.tokens * (INDEX + 1)
    return activations(job) | {"tokens": here if job.own.vocab else 0, "loss": here + job.tokens + INDEX}


def parts_of(job: Job) -> list[Part]:
    """Return the parts of the model, or of the rank's share, in the order in which backward passes through them."""
    return split_backward(job) if isinstance(job.config, Share) else backward(job)


def ends_of_forward(job: Job) -> Iterator[Moment]:
    if isinstance(job.config, Share):
        yield from split_ends_of_forward(job)
        return
    loss = backward(job)[0].worst[0]
    yield Moment("forward", A=loss.A + FLOAT, temporary=loss.temporary // 2 + FLOAT + job.losses)


def split_ends_of_forward(job: Job) -> Iterator[Moment]:
    """Yield the bytes at the end of a split forward.

    The rank holds its logits and their exponentials, which are saved; three numbers per token, which are all-reduced;
    and two for the loss.
    """
    own, number, A = job.own, FLOAT * job.tokens, sum(split_activations(job).values())
    temporary, copy = job.itemsize * job.tokens * own.vocab + job.losses, 0
    if longer(job):  # norms and the loss save float32 copies, so x and the logits count in addition
        temporary += job.itemsize * job.between * own.dim
        copy = number * own.vocab
        if own.ranks > own.shards:
            yield Moment("first layer", comm=2 * job.itemsize * job.tokens * own.dim)
    yield Moment("target", 0, A - job.tokens - INDEX, number, temporary + copy + 2 * number + INDEX)
    yield Moment("loss", 0, A - job.tokens - INDEX, 3 * number, temporary + copy + 2 * number)
    yield Moment("mean", 0, A - INDEX, 0, temporary + job.tokens + 2 * number + FLOAT)
    yield Moment("forward", 0, A, 0, temporary)


def longer(job: Job) -> bool:
    """Return whether norms and the loss compute in more bits than the rest."""
    return job.itemsize != FLOAT


def split_backward(job: Job) -> list[Part]:
    """Return loss, head, norm, the layers from the last to the first, and embedding, with the bytes that each holds.

    If x is whole between layers, a gradient that is all-reduced counts as comm.  If x is cut along the sequence, shards
    and gathered tensors do.  A tensor that was passed to a collective counts as comm for its whole life.
    """
    own, tokens, terms = job.own, job.tokens, split_activations(job)
    D, rows, logits = own.dim, own.vocab * own.dim, FLOAT * tokens * own.vocab
    x, out, given = (job.itemsize * n for n in (tokens * D, job.between * D, tokens * own.vocab))
    kept, inputs = layer_activations(job), terms["tokens"]
    A = sum(terms.values()) - INDEX - tokens
    parts = [Part("loss", [], [Within("loss", A, logits + 3 * FLOAT * tokens, 0)], A, given)]
    A = inputs + own.depth * kept + job.between * norm_bytes(job)
    in_head = [Within("head", A + x, given + x, rows, rows), *summed(job, "head", A, 0, rows, rows * own.tied)]
    parts += [Part("head", [rows], in_head, A, out, shared=own.tied)]
    A = inputs + own.depth * kept
    parts += [Part("norm", [D], [within_norm("norm", A, job.between * D, D)], A, out)]
    for number in reversed(range(own.depth)):
        A -= kept
        sizes, within = gpt_layers(own)[1].sizes, [*in_mlp(job, number, A), *in_attention(job, number, A)]
        parts += [Part(f"layer {number}", sizes, within, A, out)]
    return [*parts, Part("embedding", [rows], [Within("embedding", inputs, x, rows, rows)], inputs, 0)]


def in_mlp(job: Job, number: int, A: int) -> Iterator[Within]:
    """Yield the moments of `within_layer` in the mlp, and those that tensor parallelism adds.

    These are the gathered gradient of the mlp's output, with that of the product; and the gradients of its input
    through gate, through up, and their sum.
    """
    own, A = job.own, A + layer_activations(job)
    x, out, f = (job.itemsize * n for n in (job.tokens * own.dim, job.between * own.dim, job.tokens * own.hidden))
    matrix = own.dim * own.hidden
    if own.shards > 1:
        yield Within(f"down {number} arrives", A, x, 0, comm=x + out)
        yield in_shards(job, Within(f"down {number}", A, out + x + f, matrix, matrix))
    *mlp, _ = within_layer(job, number, A - layer_activations(job), layer_activations(job))
    mlp += [Within(f"up and gate {number}", A - 4 * f - x, out + 3 * x, 3 * matrix, matrix)]
    mlp += summed(job, f"mlp {number}", A - 4 * f - x, out, 3 * matrix)
    yield from (in_shards(job, at) for at in mlp)


def in_attention(job: Job, number: int, A: int) -> Iterator[Within]:
    """Yield the moments in attention.

    At "keys" the rank holds the gradients of q, and of the input through k, through v, and their sum.  At "q" it holds
    those of the input through k and v, and through q.  Finally, in the norm, it holds the gradients of all the layer's
    parameters.
    """
    own, sizes, norm = job.own, gpt_layers(job.own)[1].sizes, job.between * norm_bytes(job)
    of_q, of_k = (own.dim * heads * own.head_size for heads in (own.heads, own.kv_heads))
    q_width, matrices = own.heads * own.head_size, sum(sizes) - own.dim
    x, out, q = (job.itemsize * n for n in (job.tokens * own.dim, job.between * own.dim, job.tokens * q_width))
    keys = Within(f"keys {number}", A + norm + x, out + 3 * x + q, matrices - of_q, of_k)
    if own.copies > 1:  # the gradient of k's weight waits for its all-reduce
        keys = replace(keys, temporary=keys.temporary + job.itemsize * of_k, gradients=matrices - of_q - of_k, newest=0)
    within = [keys, Within(f"q {number}", A + norm + x, out + 2 * x + q, matrices, of_q)]
    within += summed(job, f"attention {number}", A + norm, out, matrices)
    yield from (in_shards(job, at) for at in within)
    last = within_norm(f"norm {number}", A, job.between * own.dim, sum(sizes))
    if own.shards > 1:  # the gradient of the norm's weight waits for its all-reduce
        last = replace(last, temporary=last.temporary + job.itemsize * own.dim, gradients=matrices)
    yield in_shards(job, replace(last, temporary=last.temporary + out)) if longer(job) else last


def in_shards(job: Job, at: Within) -> Within:
    """Count the gradient of the layer's output as comm if it is a shard, since it was passed to a collective."""
    out = job.itemsize * job.between * job.own.dim if job.own.shards > 1 else 0
    return replace(at, temporary=at.temporary - out, comm=at.comm + out)


def summed(job: Job, name: str, A: int, extra: int, gradients: int, newest: int = 0) -> list[Within]:
    """Return the moment in which the ranks add up the gradient of a split layer's input, of which each has a summand.

    The sum is made in one copy, or, as a shard, by way of two buffers.
    """
    x, out = (job.itemsize * n * job.own.dim for n in (job.tokens, job.between))
    if job.own.ranks == 1:
        return []
    if job.own.shards == 1:
        return [Within(name, A, extra + x, gradients, newest, comm=x)]
    return [Within(name, A, extra + x + out, gradients, newest, comm=2 * x)]


# ---- Megatron-LM -----------------------------------------------------------------------------------------

WHOLE_INPUTS = {"none": 2, "selective": 3, "all but attention": 1, "full": 1}  # tensors of x's width in `layer_terms`


def regathered_activations(job: Job, recompute: str) -> int:
    """Return the bytes of a layer whose forward saves only shards of the inputs, which backward gathers again.

    Source: Korthikanti et al. 2022, arXiv 2205.05198, section 4.2.2.
    """
    saved = WHOLE_INPUTS[recompute] * job.itemsize * (job.tokens - job.between) * job.own.dim
    return sum(layer_terms(job, recompute).values()) - saved
