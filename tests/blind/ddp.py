"""Right and wrong answers to the exercises of notebook 03, written without a look at the checks."""

from collections import defaultdict
from itertools import accumulate as running_sum



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


# ==== average_gradients: wrong ==============================================================================


# ==== accumulation: right ===================================================================================


# ==== accumulation: wrong ===================================================================================


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


# ==== buckets: wrong ========================================================================================


# ==== overlap: right ========================================================================================


# ==== overlap: wrong ========================================================================================


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
