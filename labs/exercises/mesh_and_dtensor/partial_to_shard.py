"""partial_to_shard: each rank's piece, as torch.chunk cuts it, of the sum of all summands.

The function is tried on 1 to 8 ranks: with dims that the ranks do not divide, that are shorter than the number of
ranks, or that are empty; with each dim of tensors of one to three dims; with five dtypes; with tensors that are not
contiguous; in a group of some ranks; and in two calls in a row.  The summand must stay as it was.  The function may
send the bytes of a reduce-scatter, including its padding.
"""

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.common_mistakes import Memory, Sends, alone, made_of
from labs.exercises.engine.on_ranks import BF16, F32, I32, I64, Draw, Exercise, Expected, Given, Mistakes, checked
from labs.exercises.engine.value import One, as_if

BUDGET = (64, 96)  # the shape of the tensor whose bytes stand in the line of success
EMPTY = "right only where no piece is empty"


def worlds(draw: Draw) -> dict[int, list[Given]]:
    def case(ranks: int, shape: tuple[int, ...], dim: int, only: str = "", **options: Any) -> Given:
        return draw.given(ranks, shape, only, args={"dim": dim}, **options)

    a, many = draw.random.randrange(2, 6), draw.random.choice((5, 6, 7, 8))
    plain = [
        ((a, 12), 1),
        ((3, 8, a), 1),
        ((2, 3, 8), 2),
        ((3, 3, 8), 2),
        ((4 * a + draw.random.randrange(1, 4), 3), 0),
    ]
    return {
        4: [
            case(4, BUDGET, 0, dtype=F32),
            case(4, (8, a), 0),
            case(4, (8, a), 0, "right only the first time"),
            *(case(4, shape, dim) for shape, dim in plain),
            *(case(4, shape, dim, EMPTY) for shape, dim in (((5, a), 0), ((a, 2), 1), ((1,), 0), ((0, 3), 0))),
            *(case(4, (9, 4), 0, "right only in some dtypes", dtype=dtype) for dtype in (F32, BF16, I64, I32)),
            *(
                case(4, shape, dim, "right only for contiguous tensors", strided=True)
                for shape, dim in (((6, 10), 1), ((8, 3), 0), ((2, 3, 9), 2))
            ),
            case(4, (7, 4), 0, "right only on the group of all ranks", group=(1, 2, 3)),
        ],
        3: [case(3, (6, a), 0), case(3, (7, 2), 0)],
        1: [case(1, (5, 3), 1, "right only on more than one rank")],
        many: [case(many, (2 * many, 3), 0), case(many, (3, many + 1), 1, EMPTY)],
    }


def dim_of(world: Given) -> int:
    return world.args["dim"]


def longest(world: Given) -> int:
    """Return the length, along the cut dim, of the longest rank's piece."""
    return -(-world.shape[dim_of(world)] // world.n)


def pieces(world: Given, whole: Tensor, dim: int | None = None) -> list[Tensor]:
    """Return each rank's piece of the sum; a piece behind the end of the dim has no elements."""
    dim = dim_of(world) if dim is None else dim
    cut = list(whole.chunk(world.n, dim))
    return cut + [whole.narrow(dim, 0, 0)] * (world.n - len(cut))


def sends(world: Given) -> Sends:
    padded = world.nbytes // max(1, world.shape[dim_of(world)]) * longest(world) * world.n
    return Sends((world.n - 1) * world.nbytes, lambda rank: (world.n - 1) / world.n * padded + 16 * world.n)


def in_memory_order(world: Given) -> list[Tensor | None]:
    """Return each rank's run of the flattened sum, in place of its piece along the dim; None if a run is too short."""
    cut, flat = pieces(world, world.total), world.total.flatten()
    runs = [flat[i * x.numel() : (i + 1) * x.numel()] for i, x in enumerate(cut)]
    return [run.reshape(x.shape) if run.numel() == x.numel() else None for run, x in zip(runs, cut, strict=True)]


def sums_at_other_places(one: One) -> bool:
    """Return whether all numbers of a wrong piece are elements of the sum, at other places."""
    whole = one.world.total.flatten().double()
    return bool((one.received.flatten().double()[:, None] - whole[None]).abs().min(1).values.max() < 1e-9)


def of_shape(matches: Callable[[One], bool]) -> Callable[[One], str | bool]:
    """Return a row's test, which describes a piece of a wrong shape, if it `matches`."""
    return lambda one: (
        isinstance(one.received, Tensor)
        and one.received.shape != one.expected.shape
        and matches(one)
        and f"returned {one.description}; its piece has shape {tuple(one.expected.shape)}"
    )


def along_another_dim(one: One) -> bool:
    """Return whether the shape is that of a piece along another dim."""
    others = [dim for dim in range(len(one.world.shape)) if dim != dim_of(one.world)]
    return any(one.received.shape == pieces(one.world, one.world.total, dim)[one.index].shape for dim in others)


def padded(one: One) -> bool:
    """Return whether the piece still has its padding."""
    longer = one.received.numel() > one.expected.numel() and one.received.ndim == one.expected.ndim
    return longer and one.received.shape[dim_of(one.world)] == longest(one.world)


# fmt: off
EXERCISE = Exercise(
    worlds,
    Expected(
        lambda world: pieces(world, world.total),
        summands=lambda world, index: [pieces(world, x)[index] for x in world.xs],
    ),
    question="Of which summands, and of which of their elements, is this made?",
    sends=sends,
    # There is room for a padded copy of the summand, and for what is received.
    memory=Memory(lambda draw: draw.given(4, (256, 128), dtype=F32, args={"dim": 1}), during=4.5, after=0.25),
    mistakes=Mistakes((
        Mistake("one's own summand", "Where are the others' summands?", made_of(alone),
                symptom="no error, and numbers that are too small: a summand was taken for the tensor"),
        Mistake("cut in the order of memory",
                "Which elements lie side by side in memory, and which side by side along the dim?",
                lambda one: dim_of(one.world) > 0 and (as_if(in_memory_order)(one) or sums_at_other_places(one))),
    ), form=(
        Mistake("the padding is still there", "Which of the elements are padding, and who cuts them off?",
                of_shape(padded), symptom="right where the dim divides; elsewhere the last pieces end in zeros"),
        Mistake("cut along another dim", "Which dim does Shard(dim) name?", of_shape(along_another_dim)),
    )),
    questions={
        "another shape": "How does torch.chunk cut this many elements into N pieces?",
        "averaged instead of summed": "What do the summands make: a sum, or a mean?",
        "too many bytes": "Which part of your summand does each other rank need?",
        EMPTY: "A rank whose own piece is empty has summands of the others' pieces. Who waits for them?",
    },
)
# fmt: on


@answered
def partial_to_shard(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(summand, dim, group=None) -> piece`: this rank's piece, along dim, of the sum of all summands."""
    recording = checked(EXERCISE, (fn,), seed).recording
    most = max(recording.sent(rank, 0) for rank in range(4)) / (4 * prod(BUDGET))
    return f"you sent {most:.2f} × the tensor per rank; the least possible is 0.75 ×"
