"""Wrong answers to the exercises on paper, and the right ones that some of them spoil."""

from tests.wrong_answers.answers import wrong

# ---- fill_buckets ----------------------------------------------------------------------------------------


def fill_buckets(nbytes, bucket_bytes):
    buckets, has = [], bucket_bytes
    for i in range(len(nbytes) - 1, -1, -1):
        if has >= bucket_bytes:
            buckets, has = [*buckets, []], 0
        buckets[-1].append(i)
        has += nbytes[i]
    return buckets


@wrong("fill_buckets", "begun at the wrong end")
def from_the_first(nbytes, bucket_bytes):
    last = len(nbytes) - 1
    return [[last - i for i in bucket] for bucket in fill_buckets(nbytes[::-1], bucket_bytes)]


@wrong("fill_buckets", "closed before it is full")
def before_it_overflows(nbytes, bucket_bytes):
    buckets, has = [], 0
    for i in reversed(range(len(nbytes))):
        if not buckets or has + nbytes[i] > bucket_bytes:
            buckets.append([])
            has = 0
        buckets[-1].append(i)
        has += nbytes[i]
    return buckets


@wrong("fill_buckets", "closed one tensor too late")
def only_when_it_overflows(nbytes, bucket_bytes):
    return fill_buckets(nbytes, bucket_bytes + 1)


@wrong("fill_buckets", "only one tensor in a bucket")
def each_alone(nbytes, bucket_bytes):
    return [[i] for i in reversed(range(len(nbytes)))]


@wrong("fill_buckets", "only one bucket for them all")
def all_in_one(nbytes, bucket_bytes):
    return [list(reversed(range(len(nbytes))))] if nbytes else []


@wrong("fill_buckets", "an empty bucket")
def closed_at_once(nbytes, bucket_bytes):
    buckets, has = [[]], 0
    for i in reversed(range(len(nbytes))):
        buckets[-1].append(i)
        has += nbytes[i]
        if has >= bucket_bytes:
            buckets.append([])
            has = 0
    return buckets


@wrong("fill_buckets", "a tensor is missing, or travels twice")
def last_bucket_forgotten(nbytes, bucket_bytes):
    buckets, bucket, has = [], [], 0
    for i in reversed(range(len(nbytes))):
        bucket.append(i)
        has += nbytes[i]
        if has >= bucket_bytes:
            buckets.append(bucket)
            bucket, has = [], 0
    return buckets


@wrong("fill_buckets", "a tensor is missing, or travels twice")
def without_the_first(nbytes, bucket_bytes):
    return [[i for i in bucket if i] for bucket in fill_buckets(nbytes, bucket_bytes) if bucket != [0]]


@wrong("fill_buckets", "nothing is returned")
def printed(nbytes, bucket_bytes):
    fill_buckets(nbytes, bucket_bytes)


@wrong("fill_buckets", "a different kind of answer")
def how_many(nbytes, bucket_bytes):
    return len(fill_buckets(nbytes, bucket_bytes))


@wrong("fill_buckets")
def bytes_of_each(nbytes, bucket_bytes):
    return [[nbytes[i] for i in bucket] for bucket in fill_buckets(nbytes, bucket_bytes)]


@wrong("fill_buckets")
def sorted_within(nbytes, bucket_bytes):
    return [sorted(bucket) for bucket in fill_buckets(nbytes, bucket_bytes)]


@wrong("fill_buckets")
def never_reset(nbytes, bucket_bytes):
    buckets, has = [], bucket_bytes
    for i in reversed(range(len(nbytes))):
        if has >= bucket_bytes:
            buckets.append([])
        buckets[-1].append(i)
        has += nbytes[i]
    return buckets


@wrong("fill_buckets")
def surplus_carried_over(nbytes, bucket_bytes):
    buckets, room = [], 0
    for i in reversed(range(len(nbytes))):
        if room <= 0:
            buckets.append([])
            room += bucket_bytes
        buckets[-1].append(i)
        room -= nbytes[i]
    return buckets


@wrong("fill_buckets")
def one_call_for_each_tensor(nbytes, bucket_bytes):
    """Python stops at a depth of a thousand."""

    def go_on(i, bucket, has):
        if i < 0:
            return [bucket] if bucket else []
        bucket, has = [*bucket, i], has + nbytes[i]
        return go_on(i - 1, bucket, has) if has < bucket_bytes else [bucket, *go_on(i - 1, [], 0)]

    return go_on(len(nbytes) - 1, [], 0)


@wrong("fill_buckets")
def takes_from_the_list(nbytes, bucket_bytes):
    buckets, has = [], bucket_bytes
    while nbytes:
        if has >= bucket_bytes:
            buckets, has = [*buckets, []], 0
        has += nbytes.pop()
        buckets[-1].append(len(nbytes))
    return buckets


@wrong("fill_buckets")
def kept_from_the_last_call(nbytes, bucket_bytes, buckets=[]):  # noqa: B006  (the mistake)
    buckets += fill_buckets(nbytes, bucket_bytes)
    return buckets


@wrong("fill_buckets")
def none_of_no_bytes(nbytes, bucket_bytes):
    return [[i for i in bucket if nbytes[i]] for bucket in fill_buckets(nbytes, bucket_bytes)]


@wrong("fill_buckets")
def at_least_one_bucket(nbytes, bucket_bytes):
    return fill_buckets(nbytes, bucket_bytes) or [[]]


# ---- held_per_rank ---------------------------------------------------------------------------------------


def held_per_rank(stage, layers, ranks, size):
    p, g, s = size
    if stage == 0:
        ranks = 1
    n = sum((layer + ranks - 1) // ranks * ranks for layer in layers)
    return p * n // (ranks if stage == 3 else 1), g * n // (ranks if stage > 1 else 1), s * n // ranks


def shares(stage, n, ranks, size):
    p, g, s = size
    return [p * n / (ranks if stage > 2 else 1), g * n / (ranks if stage > 1 else 1), s * n / (ranks if stage else 1)]


@wrong("held_per_rank", "the padding is left out")
def as_the_paper_has_it(stage, layers, ranks, size):
    return shares(stage, sum(layers), ranks, size)


@wrong("held_per_rank", "the remainder of a division is lost")
def rounded_down(stage, layers, ranks, size):
    (p, g, s), n = size, sum(layers)
    return p * (n // ranks if stage > 2 else n), g * (n // ranks if stage > 1 else n), s * (n // ranks if stage else n)


@wrong("held_per_rank", "all layers are padded as one, and not each by itself")
def one_vector(stage, layers, ranks, size):
    return held_per_rank(stage, [sum(layers)], ranks, size)


@wrong("held_per_rank", "padding where none is needed")
def always_some_zeros(stage, layers, ranks, size):
    n = sum(n // ranks * ranks + ranks for n in layers) if stage else sum(layers)
    return shares(stage, n, ranks, size)


@wrong("held_per_rank", "padding under DDP, where none is needed")
def ddp_padded(stage, layers, ranks, size):
    return shares(stage, sum(-(-n // ranks) * ranks for n in layers), ranks, size)


@wrong("held_per_rank", "the padding is left out of what is whole")
def only_shards_are_padded(stage, layers, ranks, size):
    (p, g, s), n = size, sum(layers)
    shard = sum(-(-layer // ranks) for layer in layers)
    return p * (shard if stage > 2 else n), g * (shard if stage > 1 else n), s * (shard if stage else n)


@wrong("held_per_rank", "a stage leaves the earlier ones' kinds whole")
def one_kind_each(stage, layers, ranks, size):
    cut = held_per_rank(3, layers, ranks, size)
    whole = [ranks * n for n in cut] if stage else held_per_rank(0, layers, ranks, size)
    return tuple(c if stage == first else w for c, w, first in zip(cut, whole, (3, 2, 1), strict=True))


@wrong("held_per_rank", "P is cut first, not S")
def the_other_way_round(stage, layers, ranks, size):
    return held_per_rank(stage, layers, ranks, size[::-1])[::-1]


@wrong("held_per_rank", "every stage shards every kind")
def a_quarter_of_all(stage, layers, ranks, size):
    return held_per_rank(3 if stage else 0, layers, ranks, size)


@wrong("held_per_rank", "elements, and not bytes")
def counted(stage, layers, ranks, size):
    return held_per_rank(stage, layers, ranks, (1, 1, 1))


@wrong("held_per_rank", "what all ranks hold together, and not one of them")
def the_whole_bill(stage, layers, ranks, size):
    return tuple(ranks * n for n in held_per_rank(stage, layers, ranks, size))


@wrong("held_per_rank", "the order is wrong")
def in_the_order_of_the_stages(stage, layers, ranks, size):
    return held_per_rank(stage, layers, ranks, size)[::-1]


@wrong("held_per_rank", "a different kind of answer")
def the_sum(stage, layers, ranks, size):
    return sum(held_per_rank(stage, layers, ranks, size))


@wrong("held_per_rank", "a different kind of answer")
def by_kind(stage, layers, ranks, size):
    return dict(zip("PGS", held_per_rank(stage, layers, ranks, size), strict=True))


@wrong("held_per_rank", "nothing is returned")
def told(stage, layers, ranks, size):
    print(held_per_rank(stage, layers, ranks, size))


@wrong("held_per_rank")
def gradients_stay_in_stage_3(stage, layers, ranks, size):
    P, G, S = held_per_rank(stage, layers, ranks, size)
    return P, G * (ranks if stage == 3 else 1), S


@wrong("held_per_rank")
def gradients_go_with_the_optimizer(stage, layers, ranks, size):
    P, G, S = held_per_rank(stage, layers, ranks, size)
    return P, G / (ranks if stage == 1 else 1), S


@wrong("held_per_rank")
def ddp_shards_the_optimizer(stage, layers, ranks, size):
    P, G, S = held_per_rank(stage, layers, ranks, size)
    return P, G, S / (1 if stage else ranks)


@wrong("held_per_rank")
def one_layer_at_a_time(stage, layers, ranks, size):
    """Stage 3 as it is at its peak, and not at rest."""
    P, G, S = held_per_rank(stage, layers, ranks, size)
    return P + (size[0] * max(layers, default=0) if stage == 3 else 0), G, S


@wrong("held_per_rank")
def one_size_for_p_and_g(stage, layers, ranks, size):
    return held_per_rank(stage, layers, ranks, (size[0], size[0], size[2]))


@wrong("held_per_rank")
def takes_layers_out(stage, layers, ranks, size):
    held = held_per_rank(stage, layers, ranks, size)
    layers.clear()
    return held


@wrong("held_per_rank")
def fails_without_layers(stage, layers, ranks, size):
    return held_per_rank(stage, [layers[0], *layers[1:]], ranks, size)


# ---- said from memory ------------------------------------------------------------------------------------


def sent_by_rings(ranks, part=None, twice=2):
    part = (ranks - 1) / ranks if part is None else part
    return {"reduce_scatter": part, "all_gather": part, "all_reduce": twice * part, "all_to_all": part}


@wrong("sent_by_rings", "all_reduce once instead of twice")
def all_alike(ranks):
    return sent_by_rings(ranks, twice=1)


@wrong("sent_by_rings", "(N − 1) tensors instead of pieces")
def whole_tensors(ranks):
    return sent_by_rings(ranks, part=ranks - 1)


@wrong("sent_by_rings", "N pieces, and not N − 1")
def to_oneself(ranks):
    return sent_by_rings(ranks, part=1)


@wrong("sent_by_rings")
def the_limit_of_all_reduce(ranks):
    return sent_by_rings(ranks) | {"all_reduce": 2}


@wrong("sent_by_rings")
def all_to_all_of_whole_tensors(ranks):
    return sent_by_rings(ranks) | {"all_to_all": ranks - 1}


@wrong("sent_by_rings")
def of_four_ranks(ranks):
    return sent_by_rings(4)


@wrong("sent_by_rings", "a different kind of answer")
def without_all_to_all(ranks):
    return {name: part for name, part in sent_by_rings(ranks).items() if name != "all_to_all"}


@wrong("sent_by_rings", "a different kind of answer")
def as_a_list(ranks):
    return list(sent_by_rings(ranks).values())


@wrong("sent_by_rings")
def to_whole_tensors(ranks):
    return sent_by_rings(ranks, part=(ranks - 1) // ranks)


@wrong("sent_by_rings")
def rounds(ranks):
    return sent_by_rings(ranks, part=ranks - 1, twice=2) | {"all_reduce": ranks - 1}


def started_when(tensors, buckets, **other):
    return {"Naive": (0, tensors), "Bucketed": (0, buckets), "Overlapped": (buckets, 0)} | other


@wrong("started_when", "the columns are exchanged")
def sync_first(tensors, buckets):
    return {name: pair[::-1] for name, pair in started_when(tensors, buckets).items()}


@wrong("started_when", "Overlapped is made to send twice")
def started_and_repeated(tensors, buckets):
    return started_when(tensors, buckets, Overlapped=(buckets, buckets))


@wrong("started_when")
def naive_in_backward(tensors, buckets):
    return started_when(tensors, buckets, Naive=(tensors, 0))


@wrong("started_when")
def overlapped_by_tensor(tensors, buckets):
    return started_when(tensors, buckets, Overlapped=(tensors, 0))


@wrong("started_when")
def the_last_bucket_by_sync(tensors, buckets):
    return started_when(tensors, buckets, Overlapped=(buckets - 1, 1))


@wrong("started_when")
def bucketed_in_backward(tensors, buckets):
    return started_when(tensors, buckets, Bucketed=(buckets, 0))


@wrong("started_when")
def bucketed_by_tensor(tensors, buckets):
    return started_when(tensors, buckets, Bucketed=(0, tensors))


@wrong("started_when")
def sums_alone(tensors, buckets):
    return {name: sum(pair) for name, pair in started_when(tensors, buckets).items()}


def stages_by_event(**other):
    return {
        "before_forward": ("", "", "all_gather"),
        "after_forward": ("", "", "drop"),
        "before_backward": ("", "", "all_gather"),
        "after_backward": ("", "", "drop"),
        "gradient_ready": ("", "reduce_scatter", "reduce_scatter"),
        "sync": ("reduce_scatter", "", ""),
        "step": ("all_gather", "all_gather", ""),
    } | other


@wrong("stages_by_event", "stage 2 is made to reduce in sync, as stage 1 does")
def two_like_one():
    return stages_by_event(gradient_ready=("", "", "reduce_scatter"), sync=("reduce_scatter", "reduce_scatter", ""))


@wrong("stages_by_event", "stage 3 is made to gather in its step")
def three_gathers_in_step():
    return stages_by_event(step=("all_gather", "all_gather", "all_gather"))


@wrong("stages_by_event")
def one_sends_an_all_reduce():
    return stages_by_event(sync=("all_reduce", "", ""))


@wrong("stages_by_event")
def never_gathered_again():
    return stages_by_event(before_backward=("", "", ""))


@wrong("stages_by_event")
def never_dropped_after_backward():
    return stages_by_event(after_backward=("", "", ""))


@wrong("stages_by_event")
def one_reduces_each_gradient():
    return stages_by_event(gradient_ready=("reduce_scatter",) * 3, sync=("", "", ""))


@wrong("stages_by_event")
def two_drops():
    return stages_by_event(after_forward=("", "drop", "drop"))


@wrong("stages_by_event", "a different kind of answer")
def without_sync():
    return {event: stages for event, stages in stages_by_event().items() if event != "sync"}


def held_and_sent(s, r, **other):
    half = (s - 1) / s
    return {
        "FULL_SHARD": (1 / s, 3 * half),
        "SHARD_GRAD_OP": (1, 2 * half),
        "HYBRID_SHARD": (1 / s, 3 * half + 2 * (r - 1) / r / s),
    } | other


@wrong("held_and_sent", "the replicas are made to reduce everything")
def whole_gradients_across(s, r):
    return held_and_sent(s, r, HYBRID_SHARD=(1 / s, 3 * (s - 1) / s + 2 * (r - 1) / r))


@wrong("held_and_sent", "SHARD_GRAD_OP is given only a shard")
def held_in_shards(s, r):
    return held_and_sent(s, r, SHARD_GRAD_OP=(1 / s, 2 * (s - 1) / s))


@wrong("held_and_sent", "only what is held is wrong")
def hybrid_over_all_ranks(s, r):
    return held_and_sent(s, r, HYBRID_SHARD=(1 / (s * r), 3 * (s - 1) / s + 2 * (r - 1) / r / s))


@wrong("held_and_sent")
def replicas_by_one_half(s, r):
    return held_and_sent(s, r, HYBRID_SHARD=(1 / s, 3 * (s - 1) / s + (r - 1) / r / s))


@wrong("held_and_sent")
def gathered_once(s, r):
    return held_and_sent(s, r, FULL_SHARD=(1 / s, 2 * (s - 1) / s))


@wrong("held_and_sent")
def three_halves_each(s, r):
    return held_and_sent(s, r, SHARD_GRAD_OP=(1, 3 * (s - 1) / s))


@wrong("held_and_sent", "only what is held is wrong")
def full_holds_all(s, r):
    return held_and_sent(s, r, FULL_SHARD=(1, 3 * (s - 1) / s))


@wrong("held_and_sent")
def replicas_and_shards_exchanged(s, r):
    return held_and_sent(r, s)


def bubbles(p, m, v, **other):
    bubble = (p - 1) / m
    return {"GPipe": bubble, "1F1B": bubble, "interleaved": bubble / v, "zero bubble": bubble / 3} | other


@wrong("bubbles", "1F1B is given a smaller bubble than GPipe")
def half_by_1f1b(p, m, v):
    return bubbles(p, m, v, **{"1F1B": (p - 1) / m / 2})


@wrong("bubbles", "a fraction of the whole time, and not of the ideal one")
def of_the_whole(p, m, v):
    return {name: x / (1 + x) for name, x in bubbles(p, m, v).items()}


@wrong("bubbles", "interleaved has not been divided by v")
def interleaved_like_1f1b(p, m, v):
    return bubbles(p, m, v, interleaved=(p - 1) / m)


@wrong("bubbles", "p over m, and not p − 1")
def p_in_place_of_p_less_one(p, m, v):
    return {"GPipe": p / m, "1F1B": p / m, "interleaved": p / m / v, "zero bubble": p / m / 3}


@wrong("bubbles")
def no_bubble_at_all(p, m, v):
    return bubbles(p, m, v, **{"zero bubble": 0})


@wrong("bubbles")
def half_of_the_backward(p, m, v):
    return bubbles(p, m, v, **{"zero bubble": (p - 1) / m / 2})


@wrong("bubbles")
def of_the_interleaved(p, m, v):
    return bubbles(p, m, v, **{"zero bubble": (p - 1) / m / v / 3})


@wrong("bubbles")
def inverted(p, m, v):
    return {name: m / (p - 1) if p > 1 else 0 for name in bubbles(p, m, v)}


# ---- my_shard --------------------------------------------------------------------------------------------


def my_shard(elements, ranks, rank):
    longest = -(-elements // ranks)
    start = min(rank * longest, elements)
    return start, min(start + longest, elements)


@wrong("my_shard", "the last elements are nobody's")
def by_whole_division(elements, ranks, rank):
    size = elements // ranks
    return rank * size, (rank + 1) * size


@wrong("my_shard", "the last rank is given a longer shard than the others")
def rest_to_the_last(elements, ranks, rank):
    size = elements // ranks
    return rank * size, elements if rank == ranks - 1 else (rank + 1) * size


@wrong("my_shard", "not cut as torch.chunk cuts")
def as_even_as_can_be(elements, ranks, rank):
    sizes = [elements // ranks + (r < elements % ranks) for r in range(ranks)]
    return sum(sizes[:rank]), sum(sizes[: rank + 1])


@wrong("my_shard", "past the end")
def rounded_up_alone(elements, ranks, rank):
    longest = -(-elements // ranks)
    return rank * longest, (rank + 1) * longest


@wrong("my_shard", "start and length instead of start and stop")
def its_length(elements, ranks, rank):
    start, stop = my_shard(elements, ranks, rank)
    return start, stop - start


@wrong("my_shard", "an empty shard that does not end where it starts")
def start_past_the_end(elements, ranks, rank):
    longest = -(-elements // ranks)
    return rank * longest, min((rank + 1) * longest, elements)


@wrong("my_shard")
def the_last_element_included(elements, ranks, rank):
    start, stop = my_shard(elements, ranks, rank)
    return start, stop - 1


@wrong("my_shard")
def ranks_from_one(elements, ranks, rank):
    return my_shard(elements, ranks, rank - 1)


@wrong("my_shard")
def one_too_long_where_it_divides(elements, ranks, rank):
    longest = elements // ranks + 1
    start = min(rank * longest, elements)
    return start, min(start + longest, elements)


@wrong("my_shard")
def in_fractions(elements, ranks, rank):
    return elements / ranks * rank, elements / ranks * (rank + 1)
