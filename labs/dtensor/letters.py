"""Letters that depend on shapes, such as "ab,.b->ab" (labs.dtensor.algebra): a function for each kind of operation.

Each function takes the shape of the output, or a list of shapes if there are several outputs, and the operation's
arguments, with a Spec in place of each tensor.  The table that uses the functions is in labs.dtensor.rules.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from labs.dtensor.placement import Spec

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def broadcast(out: Sequence[int], *args: Any) -> str:
    """Give every dim of the output a letter; an input has a dot for a dim of size 1 that is repeated."""
    letters = ALPHABET[: len(out)]
    inputs = []
    for x in (x for x in args if isinstance(x, Spec)):
        start = len(out) - len(x.shape)
        dims = zip(letters[start:], out[start:], x.shape, strict=True)
        inputs.append("".join(letter if full == size else "." for letter, full, size in dims))
    return f"{','.join(inputs)}->{letters}"


def alike(out: Sequence[int], x: Spec, *args: Any) -> str:
    if tuple(out) != x.shape:
        raise NotImplementedError(
            f"a new tensor of shape {tuple(out)} like a DTensor of another shape, {x.shape}: make it a DTensor itself"
        )
    return broadcast(out, x)


def reduced(out: Sequence[int], x: Spec, dim: Any = None, keepdim: bool = False) -> str:
    letters = ALPHABET[: len(x.shape)]
    dims = (
        range(len(letters))
        if dim in (None, [])
        else [d % max(1, len(letters)) for d in ([dim] if isinstance(dim, int) else dim)]
    )
    kept = (("." if keepdim else "") if d in dims else letter for d, letter in enumerate(letters))
    return f"{letters}->{''.join(kept)}"


def transposed(out: Sequence[int], x: Spec, a: int = 0, b: int = -1) -> str:
    letters = list(ALPHABET[: len(x.shape)])
    before = "".join(letters)
    if letters:
        letters[a], letters[b] = letters[b], letters[a]
    return f"{before}->{''.join(letters)}"


def permuted(out: Sequence[int], x: Spec, dims: Sequence[int]) -> str:
    letters = ALPHABET[: len(x.shape)]
    return f"{letters}->{''.join(letters[d] for d in dims)}"


def whole_along(out: Sequence[int], x: Spec, *args: Any) -> str:
    """Keep one dim of all tensors whole: its number is the first argument that is an int."""
    letters = all_but(next(a for a in args if isinstance(a, int)), out)
    return f"{','.join([letters] * (1 + sum(isinstance(a, Spec) for a in args)))}->{letters}"


def joined(out: Sequence[int], xs: Sequence[Spec], dim: int = 0) -> str:
    return f"{','.join(all_but(dim, x.shape) for x in xs)}->{all_but(dim, out)}"


def parted(outs: Sequence[Sequence[int]], x: Spec, size: int | Sequence[int], dim: int = 0) -> str:
    letters = all_but(dim, x.shape)
    return f"{letters}->{','.join([letters] * len(outs))}"


def all_but(dim: int, shape: Sequence[int]) -> str:
    return "".join("." if d == dim % len(shape) else ALPHABET[d] for d in range(len(shape)))


def resized(out: Sequence[int], x: Spec, *args: Any) -> str:
    """Keep the dim whole whose size the operation changes."""
    letters = "".join(a if n == m else "." for a, n, m in zip(ALPHABET, x.shape, out, strict=False))
    return f"{letters}->{letters}"


def normalised(outs: Sequence[Sequence[int]], x: Spec, *args: Any) -> str:
    """Keep the last dims whole, over which the operation normalises, and so all dims of a weight and a bias."""
    dims = next(a for a in args if not isinstance(a, Spec))
    rows, whole = ALPHABET[: len(x.shape) - len(dims)], "." * len(dims)
    inputs, outputs = (
        ",".join(whole if len(shape) == len(dims) else rows + whole for shape in shapes)
        for shapes in ([a.shape for a in (x, *args) if isinstance(a, Spec)], outs)
    )
    return f"{inputs}->{outputs}"


def looked_up(out: Sequence[int], weight: Spec, indices: Spec, *args: Any) -> str:
    letters = ALPHABET[: len(indices.shape)]
    return f"vw,{letters}->{letters}w"


def looked_up_backward(
    out: Sequence[int], gradient: Spec, indices: Spec, rows: int, padding: int, by_frequency: bool
) -> str:
    """Keep the indices whole if each row's gradient is divided by the row's frequency among all indices."""
    letters = "." * len(indices.shape) if by_frequency else ALPHABET[: len(indices.shape)]
    return f"{letters}w,{letters}->.w"


def reshaped(out: Sequence[int], x: Spec, *args: Any) -> str:
    """Give a letter to each dim that stays as it is, and a capital to the first of dims that are merged or split.

    The first of several merged or split dims may stay cut if the number of pieces divides its size, before and after.
    """
    before, after = ["."] * len(x.shape), ["."] * len(out)
    for letter, (i, j, alone) in zip(ALPHABET, leading_dims(x.shape, out), strict=False):
        if alone or x.shape[i] % x.pieces(i) == out[j] % x.pieces(i) == 0:
            before[i] = after[j] = letter if alone else letter.upper()
    return f"{''.join(before)}->{''.join(after)}"


def leading_dims(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Group the dims of two shapes, so that each group has as many elements in both.

    Returns for each group its first dim in both shapes, and whether the group has no other dims.
    """
    groups, i, j = [], 0, 0
    while prod(before) and i < len(before) and j < len(after):
        if before[i] == 1 or after[j] == 1:  # dims of size 1 come and go
            i, j = i + (before[i] == 1), j + (before[i] != 1)
            continue
        first, n, m = (i, j), before[i], after[j]
        i, j = i + 1, j + 1
        while n != m:
            if n < m:
                n, i = n * before[i], i + 1
            else:
                m, j = m * after[j], j + 1
        groups.append((*first, (i, j) == (first[0] + 1, first[1] + 1)))
    return groups
