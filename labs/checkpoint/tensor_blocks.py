"""Blocks of a tensor: the blocks that a rank holds, the blocks in a file, and their intersections.

    common         returns the intersection of two blocks
    within         returns the place of a block in another block that contains it
    of_range       returns the blocks that make up a range of the elements in order, as ZeRO shards them
    require_whole  checks that blocks make up the whole tensor, without gaps or overlaps
    assign_pieces  decides which rank writes which block: each block is written once, though several ranks may hold it

All functions here are arithmetic on offsets and shapes.  PyTorch calls a block a ChunkStorageMetadata.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from math import prod

from labs.dtensor.placement import Block

Piece = tuple[str, Block]  # a tensor's key, and a block of that tensor


def whole(shape: Sequence[int]) -> Block:
    return Block((0,) * len(shape), tuple(shape))


def common(a: Block, b: Block) -> Block | None:
    """Return the intersection of two blocks, or None if it is empty."""
    first = tuple(map(max, a.offset, b.offset))
    last = [min(p + n, q + m) for p, n, q, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True)]
    shape = tuple(end - begin for begin, end in zip(first, last, strict=True))
    return Block(first, shape) if all(n > 0 for n in shape) else None


def within(block: Block, other: Block) -> tuple[slice, ...]:
    begins = tuple(a - b for a, b in zip(block.offset, other.offset, strict=True))
    return Block(begins, block.shape).slices


def of_range(shape: Sequence[int], start: int, stop: int) -> list[Block]:
    """Return the blocks of the elements start:stop of a tensor: the end of a row, whole rows, the beginning of a row.

    of_range((3, 4), 2, 9) gives [0:1, 2:4], [1:2, 0:4], [2:3, 0:1].
    """
    if start >= stop:
        return []
    if not shape:
        return [Block((), ())]
    row = tuple(shape[1:])
    n = prod(row)
    first, last = -(-start // n), stop // n  # the rows that lie in the range as a whole
    if first > last:
        return in_row(last, row, start - last * n, stop - last * n)
    middle = [Block((first, *whole(row).offset), (last - first, *row))] if first < last else []
    before = in_row(first - 1, row, start - (first - 1) * n, n) if start < first * n else []
    return [*before, *middle, *in_row(last, row, 0, stop - last * n)]


def in_row(i: int, row: tuple[int, ...], start: int, stop: int) -> list[Block]:
    return [Block((i, *block.offset), (1, *block.shape)) for block in of_range(row, start, stop)]


def require_whole(key: str, shape: Sequence[int], found: set[Block]) -> None:
    """Raise ValueError if blocks overlap, leave a gap, or lie outside of the tensor."""
    if covered_once(shape, found):
        return
    for a, b in combinations(sorted(found, key=lambda block: block.offset), 2):
        if (twice := common(a, b)) is not None:
            raise ValueError(
                f"{key!r} is cut in two ways: {as_slices(twice)} is in {as_slices(a)} and in {as_slices(b)}; cut "
                "a tensor alike on all ranks"
            )
    for block in found:
        if prod(block.shape) and common(block, whole(shape)) != block:
            raise ValueError(f"{as_slices(block)} is no part of {key!r}, of shape {tuple(shape)}")
    missing = prod(shape) - sum(prod(block.shape) for block in found)
    raise ValueError(f"{missing} of the {prod(shape)} elements of {key!r} are on no rank: call save on all ranks")


def covered_once(shape: Sequence[int], found: set[Block]) -> bool:
    """Return whether the blocks cover each element once, in time that grows linearly with the number of blocks.

    In one dim, let +1 stand at the index where a block begins, and -1 at the index where it ends.  The sum up to an
    element is the number of blocks that cover it, so the blocks cover each element once exactly if their signs add up
    to those of the whole tensor.  In several dims, each corner of a block has the product of the signs that it has
    along the dims.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    signs = [prod(each) for each in product((1, -1), repeat=len(shape))]
    for block, times in [(whole(shape), -1), *((block, 1) for block in found)]:
        ends = [(at, at + n) for at, n in zip(block.offset, block.shape, strict=True)]
        for corner, sign in zip(product(*ends), signs, strict=True):
            corners[corner] += sign * times
    return not any(corners.values())


def as_slices(block: Block) -> str:
    return f"[{', '.join(f'{at}:{at + n}' for at, n in zip(block.offset, block.shape, strict=True))}]"


def assign_pieces(held: Sequence[Mapping[Piece, int]]) -> list[list[Piece]]:
    """Return, for each rank, the pieces of tensors that it writes in a save.

    A piece that several ranks hold is written by the rank among them that has the fewest bytes to write so far.

    held: for each rank, the pieces that the rank holds, with their sizes in bytes
    """
    holders: dict[Piece, list[int]] = {}
    for rank, pieces in enumerate(held):
        for piece in pieces:
            holders.setdefault(piece, []).append(rank)

    def last_those_with_a_choice(piece: Piece) -> tuple:
        key, block = piece
        return len(holders[piece]) > 1, -held[holders[piece][0]][piece], key, block.offset

    busy, writes = [0] * len(held), [[] for _ in held]
    for piece in sorted(holders, key=last_those_with_a_choice):
        rank = min(holders[piece], key=lambda rank: (busy[rank], rank))
        busy[rank] += held[rank][piece]
        writes[rank].append(piece)
    return writes
