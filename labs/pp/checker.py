"""The check of a schedule: can these lists of instructions be run?  The checker answers before any instruction runs.

    validate     raises WrongSchedule if the lists cannot be run: an instruction is missing, or is there twice, or waits
                 for an instruction that never comes
    in_order     yields the instructions of all ranks, each after those that it needs
    alive        counts the micro-batches whose activations a rank holds, after each of its instructions

The order of instructions is Lamport's happens-before (1978, "Time, Clocks, and the Ordering of Events in a Distributed
System"): an instruction happens after the one before it on its rank, and after all instructions that it needs, on any
rank.  Lists can be run if no instruction happens before itself.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, product

from labs.pp.instructions import B, F, I, Instruction, Lists, W, makes, needs

Place = tuple[int, int]  # a rank, and an index in its list, both from 0


class WrongSchedule(ValueError):
    """An error in a schedule.

    rank, place: the rank of the first wrong instruction, and its index in the list, both from 0.  For a missing
        forward, place is the end of the list.
    places: (rank, place) of every instruction that waits, if ranks wait for each other; otherwise of the wrong
        instruction.
    """

    def __init__(self, text: str, *places: Place):
        super().__init__(text)
        self.places = places or ((0, 0),)
        self.rank, self.place = self.places[0]


def validate(lists: Lists) -> None:
    """Raise WrongSchedule, with the place and the reason, unless the ranks of a pipeline can run these lists."""
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
    """Yield (rank, instruction) in an order in which the lists can be run, as far as they can be.

    The order goes in rounds: in a round, every rank runs its next instruction, if all that it needs ran before.

    stages: the number of stages, if the lists may lack some stages.
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
    """Return, for each rank, the number of micro-batches whose activations it holds after each of its instructions.

    An F stores activations; a B or W frees them.  I frees a part of the activations that depends on the model, so that
    part is not counted.  If a rank has several stages, a micro-batch counts once per stage.
    """
    return [list(accumulate(isinstance(x, F) - isinstance(x, B | W) for x in order)) for order in lists]


def stages_of(lists: Lists) -> int:
    return 1 + max((x.stage for order in lists for x in order), default=-1)


def microbatches_of(lists: Lists) -> int:
    return 1 + max((x.microbatch for order in lists for x in order), default=-1)


def ranks_of(lists: Lists) -> dict[int, int]:
    """Return `{stage: rank}`."""
    return {x.stage: rank for rank, order in enumerate(lists) for x in order}


# ---- errors ----------------------------------------------------------------------------------------------


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
    """Return `{result: (rank, place) of the instruction that computes it}`.

    Raises WrongSchedule if two instructions compute one result, or if a stage is on two ranks.
    """
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
    """Raise WrongSchedule unless each micro-batch goes forward and backward through each stage.

    A split backward needs both of its halves, I and W.
    """
    stages, microbatches, ranks = stages_of(lists), microbatches_of(lists), ranks_of(lists)
    for m, s in product(range(microbatches), range(stages)):
        if F(s, m) not in places:
            every = f"each of {microbatches} micro-batches goes forward through each of {stages} stages"
            rank = ranks.get(s, s % len(lists))  # a likely rank, if its stage is on none
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
    """Raise WrongSchedule if an instruction stands before another one of its rank that it needs."""
    stages = stages_of(lists)
    for place, rank in sorted((place, rank) for rank, place in places.values()):
        for need in needs(lists[rank][place], stages):
            of, at = places[need]
            if of == rank and at > place:
                raise wrong(lists, (rank, place), f"but {lists[of][at]!r}, which it needs, stands at its {nth(at)}")


def circle(lists: Lists, ran: list[int], places: dict[Instruction, Place]) -> WrongSchedule:
    """Return the error for ranks that wait for each other in a circle.

    No rank can go on, so each rank that has not finished waits for another: follow the waits until a rank comes again.

    ran: the number of instructions that each rank has run.
    """
    stages, waits = stages_of(lists), {}
    for rank, (place, order) in enumerate(zip(ran, lists, strict=True)):
        for need in needs(order[place], stages) if place < len(order) else ():
            of, at = places[need]
            if at >= ran[of]:
                waits[rank] = of, at
    chain = [next(iter(waits))]
    while (first := waits[chain[-1]][0]) not in chain:
        chain.append(first)
    sentences, waiting = [], chain[chain.index(first) :]
    for rank in waiting:
        of, at = waits[rank]
        needs_it = f"which needs {lists[of][at]!r}, rank {of}'s {nth(at)}"
        sentences.append(f"rank {rank} comes to {lists[rank][ran[rank]]!r} at its {nth(ran[rank])} place, {needs_it}")
    return WrongSchedule(f"ranks wait for each other: {'; '.join(sentences)}", *((rank, ran[rank]) for rank in waiting))


def wrong(lists: Lists, at: Place, why: str) -> WrongSchedule:
    rank, place = at
    return WrongSchedule(f"rank {rank} runs {lists[rank][place]!r:.60} at its {nth(place)} place, {why}", at)


def nth(place: int) -> str:
    """Return an index from 0 as an ordinal number: "1st" for 0."""
    n = place + 1
    return f"{n}{'th' if n % 100 in (11, 12, 13) else {1: 'st', 2: 'nd', 3: 'rd'}.get(n % 10, 'th')}"
