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


@wrong("fill_buckets", "the first tensor first")
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


@wrong("fill_buckets", "a bucket for each tensor")
def each_alone(nbytes, bucket_bytes):
    return [[i] for i in reversed(range(len(nbytes)))]


@wrong("fill_buckets", "one bucket for all")
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


@wrong("fill_buckets", "another kind of answer")
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
