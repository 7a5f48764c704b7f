"""Answers to load_shards (08): this rank's part of a vector that lies in files."""

import torch
import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("load_shards")
HELD = (
    "each element was read once, by the rank that needs it. You held {} × the part; copied into place piece by piece, "
)
LINE = HELD.format("2.00") + "1.25 × is enough"

# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def in_common(index, read, rank, ranks):
    size = sum(n for _, n in index) // ranks
    start, stop = rank * size, (rank + 1) * size
    first, pieces = 0, []
    for name, n in index:
        begin, end = max(start - first, 0), min(stop - first, n)
        if begin < end:
            pieces.append(read(name, begin, end))
        first += n
    return torch.cat(pieces) if pieces else torch.empty(0)


@answers.right(line=HELD.format("1.25"))
def into_one(index, read, rank, ranks):
    """One piece at a time."""
    size = sum(n for _, n in index) // ranks
    part, first = None, -rank * size
    for name, n in index:
        begin, end = max(first, 0), min(first + n, size)
        if begin < end:
            piece = read(name, begin - first, end - first)
            part = piece.new_empty(size) if part is None else part
            part[begin:end] = piece
            del piece
        first += n
    return torch.empty(0) if part is None else part


# ---- wrong: which elements -------------------------------------------------------------------------------

FIRST, END = "rank * size, (rank + 1) * size", "min(stop - first, n)"
READ, IF, NEXT = "read(name, begin, end)", "if begin < end:", "first += n"
LOOP, LAST = "for name, n in index:", "torch.cat(pieces) if pieces else torch.empty(0)"
INDENT = "\n    "
FEW, MANY, ANOTHER = "too few elements", "too many elements", "another rank's part"

spoil = answers.slips(in_common)
spoil(ANOTHER, {FIRST: "(rank + 1) % ranks * size, ((rank + 1) % ranks + 1) * size"})
spoil("the whole vector on every rank", {FIRST: "0, size * ranks"})
spoil("begun anew in each file", {NEXT: "pass"})
spoil("as if as many ranks had saved", {"// ranks": "// len(index)"})
spoil("files of equal size are assumed", {NEXT: "first += index[0][1]"})
spoil("the files in another order", {LOOP: "for name, n in sorted(index):"})
spoil("pieces in the wrong order",
    {"pieces.append(read(name, begin, end))": "pieces.insert(0, read(name, begin, end))"})
spoil("off by one", {FIRST: "rank * size, (rank + 1) * size - 1"})
spoil(FEW, {READ: "read(name, begin, end - 1)"})
spoil(MANY, {READ: "read(name, 0, n)"})
spoil("not a tensor", {"torch.cat(pieces)": "pieces"})
spoil("another shape", {"torch.cat(pieces)": "torch.cat(pieces)[None]"})
spoil("right only in some dtypes", {"torch.cat(pieces)": "torch.cat(pieces).float()"})
spoil("right only on several ranks", {"return torch": "return read(*index[0][:1], 0, 1) if ranks == 1 else torch"})
spoil("right only on up to four ranks", {FIRST: "min(rank, 3) * size, (min(rank, 3) + 1) * size"})
spoil("right only where there are elements", {LAST: "torch.cat(pieces)"})
spoil("right only where all ranks of the job take part",
    {FIRST: "dist.get_rank() % ranks * size, (dist.get_rank() % ranks + 1) * size"})


# ---- wrong: what is read ---------------------------------------------------------------------------------

OTHERS, ALL = "more than its part is read", "every rank reads everything"
EMPTY, SMALL, TWICE, OUTSIDE = "an empty read", "many small reads", "read twice", "outside of a file"

spoil(OTHERS, {READ: "read(name, 0, n)[begin:end]"})
spoil(ALL,
    {LOOP: f"files = {{name: read(name, 0, n) for name, n in index}}{INDENT}{LOOP}",
     READ: "files[name][begin:end]"})
spoil(OUTSIDE, {END: "min(stop - first, n + 1)", IF: "if begin < min(end, n):"})
spoil(EMPTY, {IF: "if begin <= end:"})
spoil(SMALL, {"pieces.append(read(name, begin, end))": "pieces += [read(name, i, i + 1) for i in range(begin, end)]"})
spoil(TWICE, {READ: "read(name, begin, end)[: len(read(name, begin, end))]"})


@answers.wrong("not read")
def looked_behind_it(index, read, rank, ranks):
    [files] = (cell.cell_contents for cell in read.__closure__ if isinstance(cell.cell_contents, dict))
    size = sum(n for _, n in index) // ranks
    return torch.cat(list(files.values()))[rank * size : (rank + 1) * size].clone()


def read_whole(index, read):
    return torch.cat([read(name, 0, n) for name, n in index])


@answers.wrong("one rank reads for all", alone=True)
def rank_0_reads_and_scatters(index, read, rank, ranks):
    size = sum(n for _, n in index) // ranks
    part = torch.empty(size)
    dist.scatter(part, list(read_whole(index, read).chunk(ranks)) if rank == 0 else None)
    return part


# ---- wrong: what else ------------------------------------------------------------------------------------

spoil("something is sent", {"return torch": "dist.barrier()\n    return torch"}, alone=True)


KEPT = []


@answers.wrong("something is kept from the call")
def kept(index, read, rank, ranks):
    part = into_one(index, read, rank, ranks)
    KEPT.append(part.clone())
    return part


@answers.wrong("full copies are kept")
def copies_of_copies(index, read, rank, ranks):
    first = in_common(index, read, rank, ranks)
    second = first.clone()
    third = second + first
    return third - second
