"""Answers to an exercise of notebook 09: which heads each rank has, and with whom it shares some."""

from functools import partial

import torch
import torch.distributed as dist  # noqa: F401 (it stands in words that are exchanged)

from tests.answers import Exercise

# fmt: off
answers = Exercise("deal_heads")


@answers.right(
    line="21 deals, on 1 to 16 ranks: each head once, its keys and values beside it, and not one message"
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


# ---- other ranks have other heads of keys and values -----------------------------------------------------

NO_HEAD, UNEVEN = "a rank without a head", "uneven, or the extra heads are not on the first ranks"
NOT_ONCE, NOT_READ = "a query head is missing, or there twice", "keys and values that its queries do not read"


def cut(mistake, start, stop, **options):
    """Note a wrong answer that cuts the heads of keys and values from `start` to `stop`."""
    changes = {"rank * least + min(rank, more)": start, "start + least + (rank < more)": stop}
    answers.spoil(side_by_side, mistake, changes, **options)


cut(UNEVEN, "rank * least + max(0, rank - ranks + more)", "start + least + (rank >= ranks - more)")
cut(NO_HEAD, "min(rank * -(-kv_heads // ranks), kv_heads)", "min(start - (-kv_heads // ranks), kv_heads)")
cut(NOT_ONCE, "rank * least", "start + least")

spoil = partial(answers.spoil, side_by_side)
spoil(
    NOT_READ,
    {"if ranks > kv_heads:": "if kv_heads % ranks:", "= ranks // kv_heads,": "= max(1, ranks // kv_heads),"},
)
spoil(
    "ranks that share are not neighbours",
    {
        "rank // copies": "rank % kv_heads",
        "range(key * copies, (key + 1) * copies)": "range(key, ranks, kv_heads)",
        "range(rank * each, (rank + 1) * each)": "range(key * together, key * together + each)",
        "return queries": "return queries if ranks <= kv_heads else [h + rank // kv_heads * each for h in queries]",
    },
)
FIRST = "together = heads // kv_heads"
spoil("not the same for everybody who asks", {FIRST: f"rank = dist.get_rank() % ranks; {FIRST}"})
asks = "dist.all_gather_object([None] * dist.get_world_size(), (heads, kv_heads))"
spoil("it sends", {FIRST: f"{asks}; {FIRST}"})


@answers.wrong("keys and values twice, where there are enough")
def queries_evenly(heads, kv_heads, ranks, rank):
    deal = [part.tolist() for part in torch.arange(heads).tensor_split(ranks)]
    kvs = [sorted({h * kv_heads // heads for h in q}) for q in deal]
    return deal[rank], kvs[rank], [r for r in range(ranks) if set(kvs[r]) & set(kvs[rank])]

# ---- what is returned ------------------------------------------------------------------------------------


def told(mistake, *results, **options):
    for result in results:
        answers.spoil(side_by_side, mistake, {"return queries, keys, sharers": f"return {result}"}, **options)


few = "if ranks <= kv_heads else"
NOT_SUMMED, OTHERS = "the gradient of shared keys and values is not summed", "summed over the wrong ranks"
told(NOT_SUMMED, "queries, keys, [rank]", "queries, keys, sharers[:-1] or sharers")
told(
    OTHERS,
    f"queries, keys, sharers {few} list(range(ranks))",
    "queries, keys, [r for r in sharers if r != rank]",
)
told(
    "not in order",
    "sorted(queries, key=lambda h: (h % together, h)), keys, sharers",
    "queries, keys[::-1], sharers",
)
NO_LISTS = "not three lists of heads and ranks"
told(NO_LISTS, "len(queries), len(keys), len(sharers)", "queries, keys")
