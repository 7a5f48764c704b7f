"""Answers to load_shards (08): this rank's part of a vector that lies in files."""

from bisect import bisect_right
from itertools import accumulate

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


@answers.right
def from_element_to_element(index, read, rank, ranks):
    """Where the last piece ended, the next one begins."""
    ends = list(accumulate(n for _, n in index))
    at, stop, found = (ends[-1] // ranks * r for r in (rank, rank + 1, 0))
    found = [read(index[0][0], 0, 0)] if at == stop else []
    while at < stop:
        i = bisect_right(ends, at)
        begin = ends[i] - index[i][1]
        end = min(stop, ends[i])
        found.append(read(index[i][0], at - begin, end - begin))
        at = end
    return torch.cat(found)


@answers.right(line=LINE)
def by_ranges(index, read, rank, ranks):
    ends = list(accumulate((n for _, n in index), initial=0))
    size = ends[-1] // ranks
    mine = range(ends[-1])[rank * size : (rank + 1) * size]
    files = [(name, range(a, b), a) for (name, _), a, b in zip(index, ends, ends[1:], strict=False)]
    wanted = [(name, max(f.start, mine.start), min(f.stop, mine.stop), a) for name, f, a in files]
    pieces = [read(name, start - a, stop - a) for name, start, stop, a in wanted if start < stop]
    return torch.cat(pieces) if len(pieces) else torch.tensor([])


@answers.right
def what_is_skipped_and_what_is_left(index, read, rank, ranks):
    left = sum(n for _, n in index) // ranks
    skip, pieces = rank * left, []
    for name, n in index:
        if skip >= n:
            skip -= n
            continue
        if left == 0:
            break
        some = min(n - skip, left)
        pieces.append(read(name, skip, skip + some))
        skip, left = 0, left - some
    return torch.cat(pieces) if pieces else torch.zeros(0)


@answers.right
def one_after_the_other(index, read, rank, ranks):
    """A file is cut off from the front of what is left."""

    def rest(files, start, stop):
        if start >= stop:
            return ()
        (name, n), *others = files
        mine = (read(name, start, min(stop, n)),) if start < min(stop, n) else ()
        return (*mine, *rest(others, max(start - n, 0), max(stop - n, 0)))

    size = sum(n for _, n in index) // ranks
    pieces = rest(index, rank * size, (rank + 1) * size)
    return torch.cat(pieces) if pieces else torch.empty(0)


@answers.right
def of_one_piece_as_it_is(index, read, rank, ranks):
    size = sum(n for _, n in index) // ranks
    first, pieces = 0, []
    for name, n in index:
        begin, end = max(rank * size, first), min((rank + 1) * size, first + n)
        if end > begin:
            pieces += [read(name, begin - first, end - first)]
        first += n
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0)])


# ---- wrong: which elements -------------------------------------------------------------------------------

FIRST, BEGIN, END = "rank * size, (rank + 1) * size", "max(start - first, 0)", "min(stop - first, n)"
READ, IF, NEXT = "read(name, begin, end)", "if begin < end:", "first += n"
LOOP, LAST = "for name, n in index:", "torch.cat(pieces) if pieces else torch.empty(0)"
INDENT = "\n    "
FEW, MANY, ANOTHER = "too few elements", "too many elements", "another rank's part"

spoil = answers.slips(in_common)
spoil("rank 0's part on every rank", {FIRST: "0, size"})
spoil(ANOTHER, {FIRST: "(rank + 1) % ranks * size, ((rank + 1) % ranks + 1) * size"})
spoil(ANOTHER, {FIRST: "(ranks - 1 - rank) * size, (ranks - rank) * size"})
spoil("the whole vector on every rank", {FIRST: "0, size * ranks"})
spoil("begun anew in each file", {NEXT: "pass"})
spoil("begun anew in each file", {BEGIN: "start", END: "min(stop, n)"})
spoil("as if as many ranks had saved", {"// ranks": "// len(index)"})
spoil(
    "as if as many ranks had saved",
    {LOOP: "for name, n in index[rank : rank + 1]:", IF: "if n:", READ: "read(name, 0, n)"},
)
spoil("files of equal size are assumed", {NEXT: "first += index[0][1]"})
spoil("files of equal size are assumed", {NEXT: "first += size * ranks // len(index)"})
spoil("the files in another order", {LOOP: "for name, n in sorted(index):"})
spoil("the files in another order", {LOOP: "for name, n in sorted(index, key=lambda file: file[1]):"})
spoil("the files in another order", {LOOP: "for name, n in reversed(index):"})
spoil("pieces in the wrong order",
    {"pieces.append(read(name, begin, end))": "pieces.insert(0, read(name, begin, end))"})
spoil("pieces in the wrong order", {"torch.cat(pieces)": "torch.cat(sorted(pieces, key=len, reverse=True))"})
spoil("pieces in the wrong order", {"torch.cat(pieces)": "torch.cat(pieces).sort().values"})
spoil("a piece is there twice", {"torch.cat(pieces)": "torch.cat(pieces + pieces[-1:])"})
spoil("off by one", {FIRST: "rank * size, (rank + 1) * size - 1"})
spoil("off by one", {FIRST: "rank * size, (rank + 1) * size + 1"})
spoil("off by one", {FIRST: "rank * size + 1, (rank + 1) * size + 1"})
spoil("off by one", {FIRST: "max(rank * size - 1, 0), (rank + 1) * size"})
spoil(FEW, {READ: "read(name, begin, end - 1)"})
spoil(FEW, {NEXT: f"first += n{INDENT}    if pieces:{INDENT}        break"})
spoil(FEW, {NEXT: f"first += n{INDENT}    if pieces and begin >= end:{INDENT}        break"}, blind=True)
spoil(FEW, {"torch.cat(pieces)": "pieces[0]"})
spoil(FEW, {"torch.cat(pieces)": "pieces[-1]"})
spoil(FEW, {"torch.cat(pieces)": "torch.cat(pieces[:-1] or pieces)"})
spoil(FEW, {IF: "if begin < end and start <= first:"})
spoil(FEW, {IF: "if start <= first and first + n <= stop:"})
spoil(MANY, {READ: "read(name, 0, n)"})
spoil(MANY, {READ: "read(name, begin, n)"})
spoil(MANY, {READ: "read(name, 0, end)"})
spoil("", {FIRST: "rank * (size + 1), (rank + 1) * (size + 1)"})
spoil("", {"return torch": "return [] if rank else torch"})
spoil("not a tensor", {"torch.cat(pieces)": "pieces"})
spoil("not a tensor", {"torch.cat(pieces)": "torch.cat(pieces).numpy()"})
spoil("not a tensor", {"torch.cat(pieces)": "torch.cat(pieces).tolist()"})
spoil("nothing is returned", {"return torch": "torch"})
spoil("another shape", {"torch.cat(pieces)": "torch.cat(pieces)[None]"})
spoil("the dtype changed", {"torch.cat(pieces)": "torch.cat(pieces).double()"})
spoil("right only in some dtypes", {"torch.cat(pieces)": "torch.cat(pieces).float()"})
spoil("right only in some dtypes", {"torch.cat(pieces)": "torch.empty(size).copy_(torch.cat(pieces))"})
spoil("right only on several ranks", {"return torch": "return read(*index[0][:1], 0, 1) if ranks == 1 else torch"})
spoil("right only on up to four ranks", {FIRST: "min(rank, 3) * size, (min(rank, 3) + 1) * size"})
spoil("right only where there are elements", {LAST: "torch.cat(pieces)"})
spoil("right only where all ranks of the job take part",
    {FIRST: "dist.get_rank() % ranks * size, (dist.get_rank() % ranks + 1) * size"})
spoil("right only where all ranks of the job take part", {"// ranks": "// ranks * ranks // dist.get_world_size()"})


@answers.wrong("numbers that are in no file")
def some_are_never_written(index, read, rank, ranks):
    size = sum(n for _, n in index) // ranks
    part, first, start = torch.zeros(size), 0, rank * size
    for name, n in index:
        begin, end = max(start - first, 0), min(start + size - first, n)
        if begin < end:
            part[: end - begin] = read(name, begin, end)
        first += n
    return part


# ---- wrong: what is read ---------------------------------------------------------------------------------

OTHERS, ALL = "more than its part is read", "every rank reads everything"
EMPTY, SMALL, TWICE, OUTSIDE = "an empty read", "many small reads", "read twice", "outside of a file"

spoil(OTHERS, {READ: "read(name, 0, n)[begin:end]"})
spoil(ALL,
    {LOOP: f"files = {{name: read(name, 0, n) for name, n in index}}{INDENT}{LOOP}",
     READ: "files[name][begin:end]"})
spoil(OTHERS, {READ: "read(name, 0, end)[begin:]"})
spoil(OTHERS, {READ: "read(name, begin, n)[: end - begin]"})
spoil(OTHERS, {READ: "read(name, max(begin - 1, 0), end)[begin - end :]"})
spoil(OTHERS, {LOOP: f"dtype = read(index[-1][0], 0, 1).dtype if size else None{INDENT}{LOOP}"})
spoil(OUTSIDE, {END: "min(stop - first, n + 1)", IF: "if begin < min(end, n):"})
spoil(OUTSIDE, {END: "stop - first", IF: "if begin < min(end, n):"})
spoil(OUTSIDE, {BEGIN: "start - first", IF: "if max(begin, 0) < end:"})
spoil(EMPTY, {IF: "if begin <= end:"})
spoil(EMPTY, {IF: "if True:", READ: "read(name, min(begin, n), max(min(begin, n), end))"})
spoil(EMPTY, {LOOP: f"dtype = read(index[0][0], 0, 0).dtype{INDENT}{LOOP}"})
spoil(EMPTY, {IF: "if begin < end or n == 0:", READ: "read(name, min(begin, n), max(end, 0))"})
spoil(SMALL, {"pieces.append(read(name, begin, end))": "pieces += [read(name, i, i + 1) for i in range(begin, end)]"})
spoil(SMALL, {READ: "torch.cat([read(name, i, min(i + 2, end)) for i in range(begin, end, 2)])"})
spoil(SMALL, {READ: "torch.stack([read(name, i, i + 1)[0] for i in range(begin, end)])"})
spoil(TWICE, {READ: "read(name, begin, end)[: len(read(name, begin, end))]"})
spoil(TWICE, {IF: "if begin < end and len(read(name, begin, end)):"})


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


@answers.wrong("one rank reads for all", alone=True)
def rank_0_reads_and_tells(index, read, rank, ranks):
    told = [read_whole(index, read) if rank == 0 else None]
    dist.broadcast_object_list(told)
    return told[0].chunk(ranks)[rank].clone()


@answers.wrong(OTHERS, alone=True)
def each_reads_some_files_and_all_tell(index, read, rank, ranks):
    mine, told = {name: read(name, 0, n) for name, n in index[rank::ranks]}, [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    files = {name: x for each in told for name, x in each.items()}
    size = sum(n for _, n in index) // ranks
    return torch.cat([files[name] for name, _ in index])[rank * size : (rank + 1) * size].clone()


# ---- wrong: what else ------------------------------------------------------------------------------------

spoil("something is sent", {"return torch": "dist.barrier()\n    return torch"}, alone=True)


@answers.wrong("what was given has changed")
def taken_from_the_index(index, read, rank, ranks):
    size = sum(n for _, n in index) // ranks
    first, pieces = -rank * size, []
    while index:
        name, n = index.pop(0)
        begin, end = max(-first, 0), min(size - first, n)
        if begin < end:
            pieces.append(read(name, begin, end))
        first += n
    return torch.cat(pieces) if pieces else torch.empty(0)


BUFFERS, KEPT = {}, []


@answers.wrong("a later call writes into what this one returned")
def one_buffer_for_all(index, read, rank, ranks):
    part = into_one(index, read, rank, ranks)
    buffer = BUFFERS.setdefault(part.dtype, torch.empty(1 << 16, dtype=part.dtype))[: len(part)]
    return buffer.copy_(part)


@answers.wrong("something is left behind")
def another_default(index, read, rank, ranks):
    part = into_one(index, read, rank, ranks)
    torch.set_default_dtype(torch.float64 if part.dtype is torch.float64 else torch.float32)
    torch.manual_seed(0)
    return part


@answers.wrong("something is kept from the call")
def kept(index, read, rank, ranks):
    part = into_one(index, read, rank, ranks)
    KEPT.append(part.clone())
    return part


@answers.wrong("something is kept from the call")
def a_view_of_the_whole(index, read, rank, ranks):
    part = into_one(index, read, rank, ranks)
    whole = part.new_empty(len(part) * ranks)
    return whole[rank * len(part) : (rank + 1) * len(part)].copy_(part)


@answers.wrong("full copies are kept")
def copies_of_copies(index, read, rank, ranks):
    first = in_common(index, read, rank, ranks)
    second = first.clone()
    third = second + first
    return third - second


@answers.wrong("full copies are kept")
def longer_and_longer(index, read, rank, ranks):
    size = sum(n for _, n in index) // ranks
    first, parts = -rank * size, [torch.empty(0)]
    for name, n in index:
        begin, end = max(-first, 0), min(size - first, n)
        if begin < end:
            piece = read(name, begin, end)
            parts.append(torch.cat((parts[-1].to(piece.dtype), piece)))
        first += n
    return parts[-1]
