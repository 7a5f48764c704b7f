"""load_shards: a vector lies in files; each rank of another job reads its part of it, each element once.

The check makes the files (_saved_vector): `read` returns a copy, and every call is noted.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from operator import index
from typing import Any

from torch import Tensor

from labs.exercises.checkpoint._saved_vector import (
    Saved,
    as_if,
    as_they_were_saved,
    begun_anew,
    elements,
    in_another_order,
    of_equal_size,
    of_other_ranks,
    off_by_one,
)
from labs.exercises.engine import common_mistakes as rows
from labs.exercises.engine.answer import Mistake, answered, first
from labs.exercises.engine.by_script import Play, as_a_whole, checked, on_each_rank
from labs.exercises.engine.on_ranks import BF16, F32, I64, Draw
from labs.exercises.engine.scripts import Look, StepOutcomes
from labs.exercises.engine.value import One

PIECE = 1 << 13  # elements of a file, in the world in which the bytes held are measured
PIECES = 4  # files of which a rank's part is made in that world


def worlds(draw: Draw) -> dict[int, list[Saved]]:
    odd, many = draw.random.choice((5, 7, 9, 11)), draw.random.choice((5, 6, 7, 8))

    def case(ranks: int, count: int, **options: Any) -> Saved:
        """Return a world with `count` files, none of them empty, and an odd part for each rank that takes part."""
        elements = odd * len(options.get("group", range(ranks)))
        cuts = sorted(draw.random.sample(range(1, elements), count - 1))
        sizes = tuple(b - a for a, b in pairwise([0, *cuts, elements]))
        return draw.world(Saved, ranks, **{"files": sizes, "dtype": F32} | options)

    return {
        4: [
            case(4, 6),
            case(4, 2),
            case(4, 4),
            case(4, 12),  # by name, 10 comes before 2
            case(4, 1),
            case(4, 4, files=(odd,) * 4),
            case(4, 8, files=(0, odd - 2, 0, 2, 0, 2 * odd - 2, odd + 2, 0)),  # empty files, also inside a part
            *(case(4, 5, dtype=dtype, only="right only in some dtypes") for dtype in (BF16, I64)),
            case(4, 3, group=(3, 1), only="right only where all ranks of the job take part"),
            case(4, 2, files=(0, 0), only="right only where there are elements"),
        ],
        1: [case(1, 3, only="right only on several ranks")],
        many: [case(many, 5, only="right only on up to four ranks")],
    }


def load(world: Saved, fn: Callable[..., Any]) -> Iterator[Look | None]:
    files = dict(zip(world.names, world.vector.split(world.files), strict=True))
    reads: list[tuple[str, int, int]] = []

    def read(name: str, start: int, stop: int) -> Tensor:
        reads.append((name, index(start), index(stop)))
        return files[name][max(start, 0) : max(stop, 0)].clone()

    for _ in range(world.steps):
        listed, loaded = list(zip(world.names, world.files, strict=True)), None
        reads.clear()
        yield None
        loaded = fn(listed, read, world.index(), world.n)
        changed = listed != list(zip(world.names, world.files, strict=True))
        yield Look({"": loaded}, {"reads": reads, "changed": changed})


def ones(seen: StepOutcomes) -> Iterator[tuple[str, One]]:
    """Yield each rank's loaded part of the vector, beside the expected part."""
    expected_by_name = [{"": seen.world.vector[own.start : own.stop]} for own in seen.world.parts]
    for place, rank in enumerate(seen.world.members):
        yield f"on rank {rank} ", One(seen, place, "", expected_by_name)


class Reads:
    """The reads of one rank, in order: (the name of a file, start and stop in it)."""

    def __init__(self, world: Saved, place: int, reads: list[tuple[str, int, int]]) -> None:
        self.world, self.own, self.reads = world, world.parts[place], reads
        self.sizes = dict(zip(world.names, world.files, strict=True))
        places = dict(zip(world.names, world.places, strict=True))
        self.elements = [places[name][0] + i for name, start, stop in reads for i in range(start, stop)]
        self.others = set(self.elements) - set(self.own)

    @property
    def description(self) -> str:
        return f"read {len(self.elements)} elements; {len(self.own)} are its own"

    @property
    def outside(self) -> str | None:
        wrong = (read for read in self.reads if not 0 <= read[1] <= read[2] <= self.sizes[read[0]])
        return first(f"read {a}:{b} of {name}, which has {self.sizes[name]} elements" for name, a, b in wrong)

    @property
    def all_of_them(self) -> bool:
        return len(set(self.elements)) == sum(self.world.files)

    @property
    def too_often(self) -> str | None:
        times = Counter(name for name, start, stop in self.reads if start < stop)
        return first(f"read {name} in {n} pieces" for name, n in times.items() if n > 1)

    @property
    def empty(self) -> str | None:
        """Return a sentence about an empty read; a rank whose part is empty may make one, to learn the dtype."""
        names = [name for name, start, stop in self.reads if start == stop]
        return f"read nothing of {names[0]}" if len(names) > (not self.own) else None


def reads(seen: StepOutcomes) -> Iterator[tuple[str, Reads]]:
    """Yield the Reads of each rank, with words that name the rank."""
    for place, (where, done) in enumerate(on_each_rank(seen)):
        yield where, Reads(seen.world, place, done.facts["reads"])


def one_for_all(seen: StepOutcomes) -> str | None:
    """Return a sentence if only one rank has read the files, and has sent parts to the others."""
    whose = [rank for rank, done in seen.ranks if done.facts["reads"]]
    return f"only rank {whose[0]} has read, and then the ranks sent" if seen.events and len(whose) == 1 else None


# fmt: off
FIRST = "Which element of the vector is the first of this rank's part, and in which file does it lie?"
FORM = (
    *rows.FORM[:3],
    rows.FORM[-1],
    Mistake("another shape", "What is the shape of a vector?", lambda one: one.received.dim() != 1
            and f"returned {one.description}"),
)
ELEMENTS = (
    Mistake("the whole vector on every rank", "Which elements does this rank need?",
            as_if(lambda world: [[range(sum(world.files))] * world.n]),
            symptom="the job ends for want of memory as it loads, and has more than enough when it trains"),
    Mistake("another rank's part", "Where does the part of rank r begin, and how long are all parts before it?",
            as_if(of_other_ranks)),
    Mistake("as if as many ranks had saved", "How many have saved, how many load, and who says that they cut alike?",
            as_if(as_they_were_saved), symptom="right as long as the job has as many ranks as the one that saved"),
    Mistake("begun anew in each file", "Which element of the vector is element 0 of the second file?",
            as_if(begun_anew)),
    Mistake("files of equal size are assumed", "What does the index say of each file, besides its name?",
            as_if(of_equal_size)),
    Mistake("the files in another order", "Which file comes after rank-1, and who says so?", as_if(in_another_order),
            symptom="right with up to ten files: after them, rank-10 comes before rank-2"),
    Mistake("pieces in the wrong order", "In which order do the pieces lie in the vector?",
            lambda its: sorted(its.at) == its.own),
    Mistake("off by one", "In start:stop, is stop the last element, or the one after it?", as_if(off_by_one)),
    Mistake("too few elements", "Go through the files: of which is something due, from where to where?",
            lambda its: set(its.at) < set(its.own)),
    Mistake("too many elements", "Go through the files: of which is something due, from where to where?",
            lambda its: set(its.at) > set(its.own)),
    Mistake("", FIRST, lambda its: True),
)
READS = (
    Mistake("outside of a file", "Which elements does this file have, and in which file do the others lie?",
            lambda its: its.outside),
    Mistake("every rank reads everything",
            "How much is read by all ranks together, and how much would one read that loads alone?",
            lambda its: its.others and its.all_of_them and its.description,
            symptom="right, but with N ranks the disk is read N times"),
    Mistake("more than its part is read", "Which of this file's elements does this rank need?",
            lambda its: its.others and its.description,
            symptom="right, but it reads, and holds, whole files of which it needs the ends"),
    Mistake("read twice", "What have you read of this file already?",
            lambda its: len(set(its.elements)) < len(its.elements) and its.description),
    Mistake("many small reads", "How many times would you open a file, to read some elements that lie side by side?",
            lambda its: its.too_often,
            symptom="right, but on a network's disk it takes a hundred times as long as its bytes"),
    Mistake("an empty read", "What does it cost to open a file, and of which of them is something due?",
            lambda its: its.empty, symptom="every rank opens every file, and the file system is busy with that alone"),
    Mistake("not read", "How else did the numbers get here?",
            lambda its: len(its.elements) < len(its.own) and its.description),
)
ALONE = Mistake("one rank reads for all", "What do the others do meanwhile, and how much does this one hold?",
                one_for_all, symptom="more ranks do not load sooner: all of it comes through one of them")
SENT = Mistake("something is sent", "Who has what this rank needs, and who may be elsewhere yet?",
               lambda seen: seen.events and f"rank {seen.events[0].rank} calls {seen.events[0].op}")
PLAY = Play(
    worlds,
    load,
    tables=(
        (ones, FORM),
        (elements, ELEMENTS),
        (as_a_whole, (ALONE,)),
        (reads, READS),
        (as_a_whole, (SENT,)),
        (ones, rows.AFTER),
    ),
    question=FIRST,
    questions={
        "not a tensor": "What will the model be given: pieces, or one vector?",
        "the dtype changed": "In which dtype are the pieces that you have read?",
        "what was given has changed": "Whose list is the index, and who goes through it after you?",
        "full copies are kept": "What is still here of what you have read, when the last piece comes?",
    },
    memory=rows.Memory(
        lambda draw: draw.world(Saved, 4, files=(PIECE,) * (4 * PIECES), dtype=F32, steps=4), during=2, after=1,
    ),
)
# fmt: on


@answered
def load_shards(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(index, read, rank, ranks)`: it returns this rank's equal part of a vector, as one tensor.

    index: for each file its name and the number of the vector's elements in it, in the vector's order
    read: read(name, start, stop) returns these elements of a file

    Returns the text of the ✓ line, with the peak memory.
    """
    most = checked(PLAY, (fn,), seed).most
    return (
        f"each element was read once, by the rank that needs it. You held {most:.2f} × the part; copied into place "
        f"piece by piece, {1 + 1 / PIECES:.2f} × is enough"
    )
