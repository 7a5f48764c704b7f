"""A drawing of the buckets in which DeepSpeed's stage 2 reduces gradients, and of the ranks that need them.

buckets({"embed": 16384, "head": 16384}, capacity=65536, ranks=4)
"""

from collections.abc import Iterator, Mapping

from labs.cost.deepspeed_stages import reduced_together
from labs.kit.drawing.palette import INK, MUTED, PAPER, RANKS
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of

LEFT, TOP, LONG, TALL, ROW = 16, 74, 620, 44, 92  # pixels


def buckets(sizes: Mapping[str, int], capacity: int, ranks: int) -> Drawing:
    """Draw the buckets of a backward pass under DeepSpeed's stage 2, in the order in which they fill.

    sizes: {name of a parameter: elements}, in the model's order; gradients arrive from the last to the first.
    capacity: elements that fit in a bucket; a larger gradient has a bucket of its own.
    ranks: number of ranks, each of which needs an equal part of all gradients.
    """
    filled = reduced_together([*sizes.values()], capacity)
    widest = max(capacity, *map(sum, filled))
    share = -(-sum(sizes.values()) // ranks)
    words = "; ".join(f"bucket {n}: {sum(each):,} of {capacity:,} elements" for n, each in enumerate(filled, 1))
    canvas = Canvas(LEFT + LONG + 180, TOP + ROW * len(filled), "The buckets of a backward pass", f"{words}.")
    canvas.text(LEFT, 20, "The buckets of a backward pass", 14, "start", "bold")
    for rank in range(ranks):
        canvas.rect(LEFT + 130 * rank, 36, 16, 16, fill=RANKS[rank])
        canvas.text(LEFT + 130 * rank + 22, 44, f"for rank {rank}", 12, "start")
    arriving, end = reversed(sizes.items()), sum(sizes.values())
    for number, each in enumerate(filled):
        y, x = TOP + ROW * number, float(LEFT)
        canvas.rect(LEFT, y, LONG * capacity / widest, TALL, fill=PAPER, stroke=MUTED, dash="5 4", radius=0)
        owners = set()
        for name, size in (next(arriving) for _ in each):
            wide = LONG * size / widest
            right = x + wide
            for rank, part in parts(end - size, end, share):
                owners.add(rank)
                right -= LONG * part / widest
                canvas.rect(right, y, LONG * part / widest, TALL, fill=RANKS[rank], stroke="none", radius=0)
            canvas.rect(x, y, wide, TALL, fill="none", stroke=INK, radius=0)
            short = name.removesuffix(".weight").rpartition(".")[2]
            label = next((word for word in (name, short) if width_of(word, 11) < wide), "")
            canvas.text(x + wide / 2, y + TALL / 2, label, 11)
            x, end = x + wide, end - size
        note = f"bucket {number + 1}: {sum(each):,} of {capacity:,} elements"
        canvas.text(LEFT, y + TALL + 14, note, 12, "start", fill=MUTED)
        canvas.text(LEFT + LONG + 10, y + TALL / 2 - 8, "all-reduce", 12, "start", "bold")
        canvas.text(LEFT + LONG + 10, y + TALL / 2 + 8, f"needed by {listed(owners)}", 12, "start")
    return canvas.drawing()


def parts(start: int, end: int, share: int) -> Iterator[tuple[int, int]]:
    """Yield the ranks that need the elements from `start` to `end`, from the last to the first, and how many each."""
    while end > start:
        rank = (end - 1) // share
        part = end - max(start, rank * share)
        yield rank, part
        end -= part


def listed(owners: set[int]) -> str:
    *first, last = map(str, sorted(owners))
    return f"ranks {', '.join(first)} and {last}" if first else f"rank {last}"
