"""Can these lists be run?  Found out before anything runs.

    validate     raises WrongSchedule where they cannot: something is missing or stands twice, or a rank comes to an
                 instruction whose needs will never be met
    in_order     the instructions of all ranks, each behind what it needs
    alive        how many micro-batches' activations a rank holds, after each of its instructions

The order is Lamport's happens-before (1978, "Time, Clocks, and the Ordering of Events in a Distributed System"): an
instruction happens after the one before it on its rank, and after all that it needs, whichever rank does that.  Lists
can be run if no instruction happens before itself.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, product

from labs.pp.instructions import B, F, I, Instruction, Lists, W, makes, needs

Place = tuple[int, int]  # a rank, and where in its list, both from 0


class WrongSchedule(ValueError):
    """rank, place: of the first instruction that is wrong, both from 0; of a missing forward, the end of its list.

    places: of all, where ranks wait for each other.
    """

    def __init__(self, text: str, *places: Place):
        super().__init__(text)
        self.places = places or ((0, 0),)
        self.rank, self.place = self.places[0]


def validate(lists: Lists) -> None:
    """Raise WrongSchedule, which says where and why, unless these are lists that the ranks of a pipeline can run."""
    require_lists(lists)
    places = places_of(lists)
    require_complete(lists, places)
    require_own_order(lists, places)
    ran = [0] * len(lists)
    for rank, _ in in_order(lists):
        ran[rank] += 1
    if ran != list(map(len, lists)):
        raise circle(lists, ran, places)


def in_order(lists: Lists, stages: int | None = None) -> Iterator[tuple[int, Instruction]]:
    """(rank, instruction), as far as the lists can be run; stages: how many there are, if the lists may lack some.

    In rounds: in each of them a rank runs its next instruction, if what that needs was there before the round.
    """
    made, ran, stages = set(), [0] * len(lists), stages_of(lists) if stages is None else stages
    while ready := [
        (rank, order[place])
        for rank, (place, order) in enumerate(zip(ran, lists, strict=True))
        if place < len(order) and made.issuperset(needs(order[place], stages))
    ]:
        yield from ready
        for rank, instruction in ready:
            ran[rank] += 1
            made.add(makes(instruction))


def alive(lists: Lists) -> list[list[int]]:
    """By rank, after each instruction: how many micro-batches' activations it holds.

    They come with F and go with B, or with W: I lets go of a part of them, and how much that is depends on the model.
    If a rank has several stages, each of them counts.
    """
    return [list(accumulate(isinstance(x, F) - isinstance(x, B | W) for x in order)) for order in lists]


def stages_of(lists: Lists) -> int:
    return 1 + max((x.stage for order in lists for x in order), default=-1)


def microbatches_of(lists: Lists) -> int:
    return 1 + max((x.microbatch for order in lists for x in order), default=-1)


def ranks_of(lists: Lists) -> dict[int, int]:
    """The rank of each stage."""
    return {x.stage: rank for rank, order in enumerate(lists) for x in order}


# ---- what is wrong ---------------------------------------------------------------------------------------


def require_lists(lists: Lists) -> None:
    if not is_list(lists) or not all(map(is_list, lists)):
        raise WrongSchedule(f"{lists!r:.60} is no schedule: it is a list for each rank, such as [F(0, 0), B(0, 0)]")
    if not any(lists):
        raise WrongSchedule("the schedule is empty: give each rank's list instructions, such as F(stage, microbatch)")
    for rank, order in enumerate(lists):
        for place, x in enumerate(order):
            if not isinstance(x, Instruction):
                raise wrong(lists, (rank, place), "which is no instruction: write it as F(stage, microbatch)")


def is_list(x: object) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def places_of(lists: Lists) -> dict[Instruction, Place]:
    """Where each thing is made.  Raises WrongSchedule for what is made twice, or by another rank than its stage's."""
    ranks: dict[int, int] = {}
    places: dict[Instruction, Place] = {}
    for rank, order in enumerate(lists):
        for place, x in enumerate(order):
            if ranks.setdefault(x.stage, rank) != rank:
                raise wrong(lists, (rank, place), f"but stage {x.stage} is on rank {ranks[x.stage]}")
            if makes(x) in places:
                _, before = places[makes(x)]
                raise wrong(lists, (rank, place), f"and {order[before]!r}, the same work, at its {nth(before)}")
            places[makes(x)] = rank, place
    return places


def require_complete(lists: Lists, places: dict[Instruction, Place]) -> None:
    """Each micro-batch goes forward and backward through each stage, where backward is split, by both halves."""
    stages, microbatches, ranks = stages_of(lists), microbatches_of(lists), ranks_of(lists)
    for m, s in product(range(microbatches), range(stages)):
        if F(s, m) not in places:
            every = f"each of {microbatches} micro-batches goes forward through each of {stages} stages"
            rank = ranks.get(s, s % len(lists))  # where it would most likely be, if its stage is nowhere
            raise WrongSchedule(f"{F(s, m)!r} is missing: {every}", (rank, len(lists[rank])))
        if B(s, m) not in places:
            split = any(isinstance(x, I) for order in lists for x in order)
            missing = f"neither {B(s, m)!r} nor {I(s, m)!r} follows" if split else f"no {B(s, m)!r} follows"
            raise wrong(lists, places[F(s, m)], f"and {missing} it")
        rank, place = at = places[B(s, m)]
        if isinstance(lists[rank][place], I) and W(s, m) not in places:
            raise wrong(lists, at, f"and {W(s, m)!r}, the other half of the backward, is missing")
        if isinstance(lists[rank][place], B) and W(s, m) in places:
            raise wrong(lists, at, f"which is all of the backward: {W(s, m)!r} is one too many")


def require_own_order(lists: Lists, places: dict[Instruction, Place]) -> None:
    """What an instruction needs from its own rank stands before it."""
    stages = stages_of(lists)
    for place, rank in sorted((place, rank) for rank, place in places.values()):
        for need in needs(lists[rank][place], stages):
            of, at = places[need]
            if of == rank and at > place:
                raise wrong(lists, (rank, place), f"but {lists[of][at]!r}, which it needs, stands at its {nth(at)}")


def circle(lists: Lists, ran: list[int], places: dict[Instruction, Place]) -> WrongSchedule:
    """Where no rank can go on, each that is not done waits for another one: follow them until one comes again."""
    stages, waits = stages_of(lists), {}
    for rank, (place, order) in enumerate(zip(ran, lists, strict=True)):
        for need in needs(order[place], stages) if place < len(order) else ():
            of, at = places[need]
            if at >= ran[of]:
                waits[rank] = of, at
    chain = [next(iter(waits))]
    while (first := waits[chain[-1]][0]) not in chain:
        chain.append(first)
    told, waiting = [], chain[chain.index(first) :]
    for rank in waiting:
        of, at = waits[rank]
        needs_it = f"which needs {lists[of][at]!r}, rank {of}'s {nth(at)}"
        told.append(f"rank {rank} comes to {lists[rank][ran[rank]]!r} at its {nth(ran[rank])} place, {needs_it}")
    return WrongSchedule(f"ranks wait for each other: {'; '.join(told)}", *((rank, ran[rank]) for rank in waiting))


def wrong(lists: Lists, at: Place, why: str) -> WrongSchedule:
    rank, place = at
    return WrongSchedule(f"rank {rank} runs {lists[rank][place]!r:.60} at its {nth(place)} place, {why}", at)


def nth(place: int) -> str:
    """0: 1st."""
    n = place + 1
    return f"{n}{'th' if n % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"
