"""Answers to an exercise of notebook 09: which heads each rank has, and with whom it shares some."""

from functools import partial

import torch
import torch.distributed as dist  # noqa: F401 (it stands in words that are exchanged)

from labs.tp.shares import Keys, Queries
from tests.answers import Exercise

# fmt: off
answers = Exercise("deal_heads")
CACHE = {}


@answers.right(
    line="21 deals, on 1 to 16 ranks: each head once, its keys and values beside it, and not one message", blind=True
)
def side_by_side(heads, kv_heads, ranks, rank):
    together = heads // kv_heads
    if ranks > kv_heads:
        copies, each = ranks // kv_heads, heads // ranks
        key = rank // copies
        queries, keys = list(range(rank * each, (rank + 1) * each)), [key]
        sharers = list(range(key * copies, (key + 1) * copies))
    else:
        least, more = divmod(kv_heads, ranks)
        start = rank * least + min(rank, more)
        stop = start + least + (rank < more)
        queries, keys, sharers = list(range(start * together, stop * together)), list(range(start, stop)), [rank]
    return queries, keys, sharers


@answers.right
def ranges_and_tensors_in_turn(heads, kv_heads, ranks, rank):
    together, copies = heads // kv_heads, max(1, ranks // kv_heads)
    keys = range(rank // copies, kv_heads, max(1, ranks // copies))
    queries = torch.tensor([key * together + i for key in keys for i in range(together)])
    return queries.chunk(copies)[rank % copies], keys, range(rank - rank % copies, rank - rank % copies + copies)


@answers.right(blind=True)
def by_cuts(heads, kv_heads, ranks, rank):
    q, k = Queries(heads, kv_heads).cut(heads, 0, ranks), Keys(heads, kv_heads).cut(kv_heads, 0, ranks)
    same = [r for r in range(ranks) if k.starts[r] == k.starts[rank] and k.stops[r] == k.stops[rank]]
    return list(range(q.starts[rank], q.stops[rank])), list(range(k.starts[rank], k.stops[rank])), same


@answers.right(blind=True, long=True)
def by_tensor_split(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    if ranks <= kv_heads:
        kv = torch.arange(kv_heads).tensor_split(ranks)[rank].tolist()
        return [k * group + i for k in kv for i in range(group)], kv, [rank]
    queries = torch.arange(heads).view(ranks, -1)
    of_kv = torch.arange(ranks).view(kv_heads, -1)
    kv = int((of_kv == rank).any(1).nonzero())
    return queries[rank].tolist(), [kv], of_kv[kv].tolist()


@answers.right(blind=True)
def in_turn_within_a_group(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    if ranks > kv_heads:
        copies = ranks // kv_heads
        kv, place = divmod(rank, copies)
        neighbours = [kv * copies + c for c in range(copies)]
        return list(range(kv * group + place, (kv + 1) * group, copies)), [kv], neighbours
    kv = [k for k in range(kv_heads) if k % ranks == rank]
    return [h for h in range(heads) if h // group % ranks == rank], kv, [rank]


@answers.right(blind=True, long=True)
def one_card_at_a_time(heads, kv_heads, ranks, rank):
    group = heads // kv_heads
    hands = [[] for _ in range(ranks)]
    if ranks <= kv_heads:
        sizes = [kv_heads // ranks + (r < kv_heads % ranks) for r in range(ranks)]
        deck = iter(range(kv_heads))
        for hand, size in zip(hands, sizes, strict=True):
            for _ in range(size):
                k = next(deck)
                hand.extend(range(k * group, (k + 1) * group))
    else:
        deck = iter(range(heads))
        for hand in hands:
            hand.extend(next(deck) for _ in range(heads // ranks))
    kvs = [sorted({h // group for h in hand}) for hand in hands]
    return hands[rank], kvs[rank], [r for r in range(ranks) if kvs[r] == kvs[rank]]


# ---- other ranks have other heads of keys and values -----------------------------------------------------

NO_HEAD, UNEVEN = "a rank without a head", "uneven, or the extra heads are not on the first ranks"
NOT_ONCE, NOT_READ = "a query head is missing, or there twice", "keys and values that its queries do not read"


def cut(mistake, start, stop, **options):
    """Its heads of keys and values, where there are enough."""
    changes = {"rank * least + min(rank, more)": start, "start + least + (rank < more)": stop}
    answers.spoil(side_by_side, mistake, changes, **options)


blind = {"blind": True}
cut(UNEVEN, "rank * least + max(0, rank - ranks + more)", "start + least + (rank >= ranks - more)", **blind)
cut(UNEVEN, "rank * least", "kv_heads if rank == ranks - 1 else start + least", **blind, long=True)
cut(UNEVEN, "rank * least + more * (rank > 0)", "(rank + 1) * least + more", **blind, long=True)
cut(UNEVEN, "rank * kv_heads // ranks", "(rank + 1) * kv_heads // ranks", **blind)
cut(UNEVEN, "-(-rank * kv_heads // ranks)", "-(-(rank + 1) * kv_heads // ranks)", **blind, long=True)
cut(NO_HEAD, "min(rank * -(-kv_heads // ranks), kv_heads)", "min(start - (-kv_heads // ranks), kv_heads)", **blind)
cut(NOT_ONCE, "rank * least", "start + least", **blind)
cut(NOT_ONCE, "rank * least + min(rank, more)", "min(kv_heads, start + least + (rank <= more))", long=True)

spoil = partial(answers.spoil, side_by_side)
spoil(NO_HEAD, {"if ranks > kv_heads:": "if False:"}, **blind)
spoil(
    NOT_READ,
    {"if ranks > kv_heads:": "if kv_heads % ranks:", "= ranks // kv_heads,": "= max(1, ranks // kv_heads),"},
    **blind,
)
spoil(NOT_READ,
    {"rank // copies": "rank % kv_heads",
     "range(key * copies, (key + 1) * copies)": "range(key, ranks, kv_heads)"})
spoil(
    NOT_ONCE,
    {"range(rank * each, (rank + 1) * each)": "range(rank % copies * each, (rank % copies + 1) * each)"},
    **blind,
)
spoil(
    "ranks that share are not neighbours",
    {
        "rank // copies": "rank % kv_heads",
        "range(key * copies, (key + 1) * copies)": "range(key, ranks, kv_heads)",
        "range(rank * each, (rank + 1) * each)": "range(key * together, key * together + each)",
        "return queries": "return queries if ranks <= kv_heads else [h + rank // kv_heads * each for h in queries]",
    },
    **blind,
)
FIRST = "together = heads // kv_heads"
spoil("not the same for everybody who asks", {FIRST: f"rank = dist.get_rank() % ranks; {FIRST}"}, **blind)
spoil(NOT_ONCE, {FIRST: f"ranks = dist.get_world_size(); {FIRST}"}, long=True)
asks = "dist.all_gather_object([None] * dist.get_world_size(), (heads, kv_heads))"
spoil("it sends", {FIRST: f"{asks}; {FIRST}"}, **blind)
spoil("it sends", {FIRST: f"dist.all_reduce(torch.zeros(1)); {FIRST}"}, long=True)


@answers.wrong("keys and values twice, where there are enough", blind=True)
def queries_evenly(heads, kv_heads, ranks, rank):
    deal = [part.tolist() for part in torch.arange(heads).tensor_split(ranks)]
    kvs = [sorted({h * kv_heads // heads for h in q}) for q in deal]
    return deal[rank], kvs[rank], [r for r in range(ranks) if set(kvs[r]) & set(kvs[rank])]


in_turn = "[list(range(r, heads, ranks)) for r in range(ranks)]"
evenly = "[part.tolist() for part in torch.arange(heads).tensor_split(ranks)]"
answers.spoil(queries_evenly, "keys and values twice, where there are enough", {evenly: in_turn}, long=True)

# ---- what is returned ------------------------------------------------------------------------------------


def told(mistake, *results, **options):
    for result in results:
        answers.spoil(side_by_side, mistake, {"return queries, keys, sharers": f"return {result}"}, **options)


few, read, kth = (
    "if ranks <= kv_heads else",
    "[h for h in range(heads) if h // together in keys]",
    "h % kv_heads in keys",
)
NOT_SUMMED, OTHERS = "the gradient of shared keys and values is not summed", "summed over the wrong ranks"
told(NOT_SUMMED, "queries, keys, [rank]", "queries, keys, sharers[:-1] or sharers", **blind)
told(
    OTHERS,
    f"queries, keys, sharers {few} list(range(ranks))",
    "queries, keys, [r for r in sharers if r != rank]",
    **blind,
)
told(OTHERS, "queries, keys, [rank, *(r for r in sharers if r != rank)]",
    "queries, keys, sharers if len(sharers) > 1 else []",
    f"queries, keys, sharers {few} sorted((rank, rank ^ 1))", blind=True, long=True)
told(OTHERS, "queries, keys, list(range(len(sharers)))", "queries, keys, sharers if ranks > 1 else [0, 0]", long=True)
told(NO_HEAD, f"{read} * (rank == sharers[0]), keys, sharers", long=True)
idle = "[*range(rank * together, (rank + 1) * together)] * (rank < kv_heads), [rank] * (rank < kv_heads), [rank]"
told(NO_HEAD, f"(queries, keys, sharers) {few} ({idle})", blind=True, long=True)
told(
    NOT_READ,
    "queries, list(range(kv_heads)), list(range(ranks))",
    "queries, [h // together for h in queries], sharers",
    **blind,
)
told(NOT_READ, f"[h for h in range(heads) if {kth}] if ranks <= kv_heads else queries, keys, sharers",
    "queries if ranks > kv_heads else [h for h in range(heads) if h // together % ranks == rank], keys, sharers",
    f"queries {few} list(range(rank, heads, ranks)), keys, sharers", blind=True, long=True)
told(NOT_READ, f"[h for h in range(heads) if {kth}][sharers.index(rank) :: len(sharers)], keys, sharers",
    f"(queries, keys, sharers) {few} (queries, [0], list(range(ranks)))", "queries, queries, sharers",
    long=True)
told(NOT_ONCE, f"{read}, keys, sharers", **blind)
told(NOT_ONCE, "[h - queries[0] for h in queries], [k - keys[0] for k in keys], sharers", blind=True, long=True)
told(NOT_ONCE, "queries * 2, keys, sharers", "[h + 1 for h in queries], keys, sharers", long=True)
told(NOT_ONCE, "CACHE.setdefault(rank, (queries, keys, sharers))", long=True)
told(
    "not in order",
    "sorted(queries, key=lambda h: (h % together, h)), keys, sharers",
    "queries, keys[::-1], sharers",
    **blind,
)
NO_LISTS = "not three lists of heads and ranks"
told(NO_LISTS, "len(queries), len(keys), len(sharers)", "queries, keys")
told(NO_LISTS, "None", "queries, [float(key) for key in keys], sharers", long=True)
