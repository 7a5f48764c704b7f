"""What becomes of placements in an operation: a table of letters.

Give each dim of the inputs and the output a letter, the same where it is the same dim; a dim that must stay whole, or
is repeated by broadcasting, is a dot.  A matrix product is "ik,kj->ij".  Along one axis of a mesh, it can be computed

    on whole inputs                       Replicate(), Replicate() → Replicate()
    with a letter cut, wherever it is     i:  Shard(0),    Replicate() → Shard(0)
                                          j:  Replicate(), Shard(1)    → Shard(1)
    and if the output lacks the letter,   k:  Shard(1),    Shard(0)    → Partial()
    every rank has a summand
    on summands, where that is linear         Partial(),   Replicate() → Partial()
                                              Replicate(), Partial()   → Partial()

That is all (`ways`).  An operation takes the way for which the redistribution of its inputs sends least (`choose`);
GSPMD does the same for a whole program (Xu et al. 2021, arXiv 2105.04663, section 3).

`print(RULES)` shows the table.  What it is linear in: "each" input, the others whole, as products are; in all inputs
"together", as sums are; in the "first" alone.  "shape": the input's numbers do not matter.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from labs.placement import Partial, Placement, Replicate, Shard, Spec
from labs.redistribute import MOVES, plan, sent


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    letters: "ik,kj->ij", or a function that says so of the shapes: (the output's, arguments; for a tensor its Spec).
        A capital: the dim may be cut already, but must not be cut for this.
    local: what each rank does with its blocks, where that is not the operation itself: (Doing, arguments).
    tensors: linear only if it is given so many; a sum with a number is not.
    """

    letters: str | Callable[..., str]
    linear: str = ""
    local: Callable[..., Tensor] | None = None
    tensors: int = 1


@dataclass(frozen=True)
class Way:
    """Along one axis: placements that the inputs must have, and the one that the output has then.

    as_is: only where the inputs lie like this already.
    """

    inputs: tuple[Placement, ...]
    output: Placement
    as_is: bool = False

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.inputs))} → {self.output!r}"


@dataclass(frozen=True)
class Doing:
    """An operation about to be done on blocks."""

    op: Callable[..., Tensor]
    inputs: list[Spec]
    output: Spec
    coordinate: tuple[int, ...]


def ways(letters: str, linear: str = "") -> list[Way]:
    """All ways to compute an operation along one axis; the one on whole inputs first."""
    left, output = letters.split("->")
    inputs = left.split(",")
    whole = (Replicate(),) * len(inputs)
    cuts = [
        Way(
            tuple(where(letter, dims) or Replicate() for dims in inputs),
            where(letter, output) or Partial(),
            as_is=letter.isupper(),
        )
        for letter in dict.fromkeys(left)
        if letter.isalpha()
    ]
    summands = {
        "": [],
        "each": [(*whole[:i], Partial(), *whole[i + 1 :]) for i in range(len(inputs))],
        "first": [(Partial(), *whole[1:])],
        "together": [(Partial(),) * len(inputs)],
        "shape": [],
    }[linear]
    numberless = [Way((Partial(),), Replicate())] if linear == "shape" else []
    return [Way(whole, Replicate()), *cuts, *(Way(some, Partial()) for some in summands), *numberless]


def where(letter: str, dims: str) -> Shard | None:
    return Shard(dims.index(letter)) if letter in dims else None


def choose(among: Sequence[Way], inputs: Sequence[Spec], fixed: bool) -> list[Way] | None:
    """For each axis the way that sends least, the first of equals; `fixed`: the first input is written to.

    None, where there is none: what is written to stays where it is.
    """
    chosen = []
    for axis in range(len(inputs[0].mesh)):
        now = tuple(spec.placements[axis] for spec in inputs)
        open_ = [way for way in among if way.inputs == now or (not way.as_is and all(map(reachable, now, way.inputs)))]
        if fixed:
            open_ = [way for way in open_ if way.inputs[0] == way.output == now[0]]
        if not open_:
            return None
        chosen.append(min(open_, key=lambda way: cost(way, inputs, axis)))
    return chosen


def reachable(source: Placement, target: Placement) -> bool:
    return source == target or (type(source), type(target)) in MOVES


def cost(way: Way, inputs: Sequence[Spec], axis: int) -> tuple[int, int]:
    """Elements that the first rank sends so that the inputs lie like this along one axis, and in how many messages."""
    elements = messages = 0
    for spec, placement in zip(inputs, way.inputs, strict=True):
        target = (*spec.placements[:axis], placement, *spec.placements[axis + 1 :])
        elements += sent(spec, target, (0,) * len(spec.mesh))
        messages += sum(step.move.collective is not None for step in plan(spec, target))
    return elements, messages


# ---- letters that depend on shapes; x: a Spec ------------------------------------------------------------

ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def broadcast(out: Sequence[int], *args: Any) -> str:
    """Every dim of the output has a letter; an input lacks it where it has no such dim, or one of size 1."""
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
            f"a new tensor of shape {tuple(out)} out of one of {x.shape}: make it on the mesh itself"
        )
    return broadcast(out, x)


def reduced(out: Sequence[int], x: Spec, dim: Any = None, keepdim: bool = False) -> str:
    letters = ALPHABET[: len(x.shape)]
    dims = (
        range(len(letters))
        if dim in (None, [])
        else [d % len(letters) for d in ([dim] if isinstance(dim, int) else dim)]
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
    """One dim of all tensors stays whole: the first argument that is a number."""
    dim = next(a for a in args if isinstance(a, int)) % max(1, len(out))
    letters = "".join("." if d == dim else letter for d, letter in enumerate(ALPHABET[: len(out)]))
    return f"{','.join([letters] * (1 + sum(isinstance(a, Spec) for a in args)))}->{letters}"


def looked_up(out: Sequence[int], weight: Spec, indices: Spec, *args: Any) -> str:
    letters = ALPHABET[: len(indices.shape)]
    return f"vw,{letters}->{letters}w"


def looked_up_backward(out: Sequence[int], gradient: Spec, indices: Spec, *args: Any) -> str:
    letters = ALPHABET[: len(indices.shape)]
    return f"{letters}w,{letters}->.w"


def reshaped(out: Sequence[int], x: Spec, *args: Any) -> str:
    """Of dims that are merged or split, a cut of the first may stay, where its pieces are pieces of the result's."""
    before, after = ["."] * len(x.shape), ["."] * len(out)
    for letter, (i, j, alone) in zip(ALPHABET, leading_dims(x.shape, out), strict=False):
        if alone or x.shape[i] % x.pieces(i) == out[j] % x.pieces(i) == 0:
            before[i] = after[j] = letter if alone else letter.upper()
    return f"{''.join(before)}->{''.join(after)}"


def leading_dims(before: Sequence[int], after: Sequence[int]) -> list[tuple[int, int, bool]]:
    """(dim of one, dim of the other, whether that is all) for each group of dims with as many elements in both."""
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


# ---- what a rank does with its blocks, where that is something else --------------------------------------


def to_block(doing: Doing, x: Tensor, *args: Any) -> Tensor:
    return x.reshape(doing.output.block(doing.coordinate).shape)


def expand_to_block(doing: Doing, x: Tensor, *args: Any, **options: Any) -> Tensor:
    return x.expand(doing.output.block(doing.coordinate).shape)


def empty_alike(doing: Doing, x: Tensor, *args: Any, **options: Any) -> Tensor:
    return torch.empty_like(x)


def share_of_mean(doing: Doing, x: Tensor, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Tensor:
    """The sum of this rank's elements, divided by the number of all."""
    return x.sum(dim=dim, keepdim=keepdim, dtype=dtype) / (
        prod(doing.inputs[0].shape) / max(1, prod(doing.output.shape))
    )


def own_rows(doing: Doing, weight: Tensor, indices: Tensor, *args: Any) -> Tensor:
    """Rows that another rank holds are zero here."""
    rows, block = doing.inputs[0].shape[0], doing.inputs[0].block(doing.coordinate)
    if ((indices < 0) | (indices >= rows)).any():
        raise IndexError(f"an embedding of {rows} rows has no row {indices.max()} or {indices.min()}")
    start, size = block.offset[0], block.shape[0]
    mine = (indices >= start) & (indices < start + size)
    if not size:
        return weight.new_zeros(*indices.shape, weight.shape[1])
    return doing.op(weight, (indices - start) * mine, *args) * mine.unsqueeze(-1)


# ---- the table -------------------------------------------------------------------------------------------


class Rules(dict[str, Rule]):
    def __repr__(self) -> str:
        head = f"{'operation':28} {'letters':14} linear in"
        return "\n".join(
            [head, *(f"{name:28} {letters_of(rule):14} {rule.linear or '-'}" for name, rule in self.items())]
        )


def letters_of(rule: Rule) -> str:
    return rule.letters if isinstance(rule.letters, str) else rule.letters.__name__


NOT_LINEAR = (
    *("abs", "sign", "exp", "log", "sqrt", "rsqrt", "reciprocal", "pow", "sin", "cos", "relu", "gelu", "silu"),
    *("tanh", "sigmoid", "maximum", "minimum", "clamp", "clamp_min", "where", "masked_fill", "fill"),
    *("eq", "ne", "gt", "ge", "lt", "le", "isnan", "isfinite", "addcmul", "addcdiv"),
)
RULES = Rules(
    {
        "mm": Rule("ik,kj->ij", "each"),
        "bmm": Rule("bik,bkj->bij", "each"),
        "mv": Rule("ik,k->i", "each"),
        "dot": Rule("k,k->", "each"),
        "sum": Rule(reduced, "together"),
        "mean": Rule(reduced, "together", share_of_mean),
        "embedding": Rule(looked_up, "first", own_rows),
        "embedding_dense_backward": Rule(looked_up_backward, "first"),
        "t": Rule(transposed, "together"),
        "transpose": Rule(transposed, "together"),
        "permute": Rule(permuted, "together"),
        **dict.fromkeys(("view", "_unsafe_view", "unsqueeze", "squeeze"), Rule(reshaped, "together", to_block)),
        "expand": Rule(broadcast, "together", expand_to_block),
        **dict.fromkeys(("_softmax", "_log_softmax"), Rule(whole_along)),
        **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), Rule(whole_along, "first")),
        **dict.fromkeys(("add", "sub", "lerp", "copy"), Rule(broadcast, "together", tensors=2)),
        **dict.fromkeys(("neg", "clone", "detach", "alias", "_to_copy", "zero"), Rule(broadcast, "together")),
        **dict.fromkeys(("zeros_like", "empty_like"), Rule(broadcast, "together")),
        **dict.fromkeys(("ones_like", "full_like"), Rule(broadcast, "shape")),
        "new_empty_strided": Rule(alike, "together", empty_alike),
        "mul": Rule(broadcast, "each"),
        **dict.fromkeys(
            ("div", "threshold_backward", "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward"),
            Rule(broadcast, "first"),
        ),
        **dict.fromkeys(NOT_LINEAR, Rule(broadcast)),
    }
)
