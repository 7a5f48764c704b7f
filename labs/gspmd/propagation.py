"""Propagation from the layouts of a few values to the layout of every value, along one mesh axis after the other.

A letter is a dim that the tensors of an operation share, so a cut along a letter passes from each of these tensors to
the others (`pass_on`), from inputs to outputs and back.  In "ik,jk->ij",

    known                     the letter    the consequence
    ik as Shard(0)            i             ij is Shard(0)
    jk as Shard(0)            j             ij is Shard(1)
    ij as Shard(1)            j             jk is Shard(0): the cut passes from the result to an input
    ik, jk both as Shard(1)   k             none: ij has no letter k, and each rank has a summand of ij

If two letters are cut along the same axis, an operation can keep only one of the cuts, and tensors that are cut along
the other letter have to be made whole.  So the operation keeps the cut for which smaller tensors have to be moved
(`meet`).  With many tokens, the tokens' letter i stays cut, and the weight jk is gathered: that is FSDP.  With few
tokens, the weight stays in place, and the tokens move.

The propagation passes over all operations, forward and in reverse, until it finds no new layout.  A value that still
has no layout is replicated.  But a value that is a sum of the ranks' summands stays Partial() as long as it is only
added to others, so that one all-reduce suffices for all of them.
"""

from collections.abc import Mapping, Sequence
from math import prod

from labs.dtensor.algebra import ways
from labs.dtensor.placement import Partial, Placement, Replicate, Shard, Spec
from labs.gspmd.tracing import Graph, Operation, Value

Known = dict[Value, Placement]
Layouts = dict[Value, Spec]


def propagate(graph: Graph, mesh: Sequence[int], given: Mapping[Value, Sequence[Placement | None]]) -> Layouts:
    """Return the layout of each value of a graph.

    mesh: the size of each axis
    given: the layouts of some values, with one placement for each axis; None leaves an axis to the propagation

    Raises ValueError for a given layout that cuts a dim into unequal parts, or that lacks a placement for an axis.
    """
    for value, placements in given.items():
        require_even(value, mesh, placements)
    values = {value for operation in graph.operations for value in operation.values} | {*graph.arguments}
    layouts: dict[Value, tuple[Placement, ...]] = {value: () for value in values}
    for axis in range(len(mesh)):
        known = {value: p[axis] for value, p in given.items() if p[axis] is not None}
        known |= {value: Replicate() for value in graph.constants}
        along_one(graph, known, mesh, layouts)
        layouts = {value: (*before, known[value]) for value, before in layouts.items()}
    return {value: Spec(value.shape, tuple(mesh), placements) for value, placements in layouts.items()}


def along_one(graph: Graph, known: Known, mesh: Sequence[int], before: Mapping[Value, tuple[Placement, ...]]) -> None:
    """Add to `known` the placement of each value along an axis; before: the placements along all earlier axes."""
    axis = len(next(iter(before.values())))
    learned = True
    while learned:
        learned = False
        for operation in (*graph.operations, *reversed(graph.operations)):
            here = [known.get(value) for value in operation.values]
            open_ = [letter for letter in cut(operation.dims, here) if even(operation, letter, mesh, axis, before)]
            now = pass_on(operation.dims, here, meet(operation, here, open_)) if open_ else here
            news = {v: p for v, p in zip(operation.values, now, strict=True) if p is not None and v not in known}
            known |= news
            learned = learned or bool(news)
    for value in graph.arguments:
        known.setdefault(value, Replicate())
    used_by: dict[Value, list[Operation]] = {}
    for operation in graph.operations:
        for value in operation.inputs:
            used_by.setdefault(value, []).append(operation)
    for operation in graph.operations:
        summands = gives_summands(operation, known)
        for value in operation.outputs:
            users = used_by.get(value, [])
            only_added = users and all(user.linear == "together" for user in users) and value not in graph.results
            known.setdefault(value, Partial() if summands and only_added else Replicate())


def pass_on(dims: Sequence[str], known: Sequence[Placement | None], letter: str) -> list[Placement | None]:
    """Return the known placements of an operation's tensors once a letter is cut; dims: the letters of each tensor."""
    return [
        Shard(own.index(letter)) if placement is None and letter in own else placement
        for own, placement in zip(dims, known, strict=True)
    ]


def cut(dims: Sequence[str], known: Sequence[Placement | None]) -> list[str]:
    """Return the letters that are cut in any of the tensors; dims: the letters of each tensor."""
    letters = (own[p.dim] for own, p in zip(dims, known, strict=True) if isinstance(p, Shard))
    return [letter for letter in dict.fromkeys(letters) if letter.isalpha()]


def meet(operation: Operation, known: Sequence[Placement | None], letters: Sequence[str]) -> str:
    """Return the cut letter that an operation keeps, so that tensors cut along other letters have the fewest bytes.

    If several letters are equally good, the first one is kept.
    """

    def elsewhere(letter: str) -> int:
        return sum(
            value.bytes
            for value, own, placement in zip(operation.values, operation.dims, known, strict=True)
            if isinstance(placement, Shard) and own[placement.dim] != letter
        )

    return min(letters, key=elsewhere)


def gives_summands(operation: Operation, known: Known) -> bool:
    """Return whether an operation needs no redistribution of its inputs, and its outputs are summands."""
    here = tuple(known[value] for value in operation.inputs)
    return any(way.inputs == here and way.outputs[0] == Partial() for way in ways(operation.letters, operation.linear))


def even(
    operation: Operation, letter: str, mesh: Sequence[int], axis: int, before: Mapping[Value, tuple[Placement, ...]]
) -> bool:
    """Return whether each dim with this letter can be cut along the axis into equal parts, after its earlier cuts."""
    for value, own in zip(operation.values, operation.dims, strict=True):
        if letter in own:
            dim = own.index(letter)
            there = prod(n for n, p in zip(mesh, before[value], strict=False) if p.is_shard(dim))
            if value.shape[dim] % (mesh[axis] * there):
                return False
    return True


def require_even(value: Value, mesh: Sequence[int], placements: Sequence[Placement | None]) -> None:
    if len(placements) != len(mesh):
        raise ValueError(
            f"{len(placements)} placements {list(placements)}: a mesh of {len(mesh)} axes needs {len(mesh)}"
        )
    for dim, size in enumerate(value.shape):
        pieces = prod(n for n, p in zip(mesh, placements, strict=True) if isinstance(p, Shard) and p.dim == dim)
        if size % pieces:
            raise ValueError(
                f"{list(placements)} cuts dim {dim} of {value.shape} into {pieces} pieces, which cannot be equal: take "
                "another layout, or another mesh"
            )
