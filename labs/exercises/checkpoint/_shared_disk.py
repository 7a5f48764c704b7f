"""A simulated disk that several ranks share, and the contents that a power cut at any moment may leave on the disk.

Between two meetings the calls of different ranks have no order: one rank may have made all of its calls and another
none, so two ranks may not touch the same file.  A file that was not flushed is torn.  After a power cut the names are
either the current ones or the flushed ones; flush_names flushes the names that this rank has changed, and all names
that were changed before the last meeting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from labs.exercises.engine.answer import Wrong, show

LATENCY, BANDWIDTH, ENTRY = 0.5e-3, 8e6, 16  # s for each flush, bytes/s of a rank, bytes for the name of a piece
TORN = "torn"
Piece = tuple[str, int]  # the name of a tensor, and the first row of the piece
Content = Mapping[Piece, Tensor | str]
Call = tuple[Any, ...]  # the name of a method, and its arguments


class NotingDisk:
    """The disk as one rank sees it; it only notes the rank's calls.

    room: the bytes that all files on the disk may take together.
    meetings: lists of the rank's calls, one list for the time between two meetings.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.meetings: list[list[Call]] = [[]]

    def write(self, name: str, content: Content) -> None:
        """Write a new file, or replace a file's content: for each piece a tensor or, in an index, a file's name."""
        if not isinstance(content, dict) or not all(isinstance(each, Tensor | str) for each in content.values()):
            raise ValueError(
                f"{name!r} was given {show(content)}: a dict with a tensor, or a file's name, for each piece is needed"
            )
        copy = {key: each.detach().clone() if isinstance(each, Tensor) else each for key, each in content.items()}
        self.note("write", name, copy)

    def flush(self, name: str) -> None:
        self.note("flush", name)

    def rename(self, old: str, new: str) -> None:
        self.note("rename", old, new)

    def remove(self, name: str) -> None:
        self.note("remove", name)

    def flush_names(self) -> None:
        self.note("flush_names")

    def meet(self, message: Any = None) -> list[Any]:
        """Wait for all ranks, and return the messages that the ranks have brought, by rank."""
        messages = [None] * dist.get_world_size()
        dist.all_gather_object(messages, message)
        self.meetings.append([])
        return messages

    def note(self, *call: Any) -> None:
        self.meetings[-1].append(call)


def nbytes(content: Content) -> int:
    return sum(ENTRY + (each.nbytes if isinstance(each, Tensor) else 0) for each in content.values())


def seconds(calls: Sequence[Call]) -> float:
    written = sum(nbytes(call[2]) for call in calls if call[0] == "write")
    return written / BANDWIDTH + LATENCY * sum(call[0].startswith("flush") for call in calls)


def change(names: dict[str, int], name: str, number: int | None) -> None:
    names.pop(name, None)
    if number is not None:
        names[name] = number


@dataclass(frozen=True)
class Files:
    """The files on the disk at one moment.

    texts: {number of a file: (its content, whether it was flushed)}.
    now: {name: number of the file}, the current names.
    flushed: {name: number of the file}, the names that survive a power cut.
    late: (rank, name, number) of the changes of names that were not flushed; rank is None for a change before the last
        meeting, number is None if the name was removed.
    """

    texts: dict[int, tuple[Content, bool]] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    flushed: dict[str, int] = field(default_factory=dict)
    late: list[tuple[int | None, str, int | None]] = field(default_factory=list)

    def after(self, made: Mapping[int, Sequence[Call]]) -> Files:
        """Return the files after these calls, {rank: calls}; the files themselves do not change."""
        found = Files(dict(self.texts), dict(self.now), dict(self.flushed), list(self.late))
        for rank, calls in made.items():
            for call in calls:
                found.obey(rank, *call)
        return found

    def obey(self, rank: int, what: str, name: str = "", *given: Any) -> None:
        number = self.now.get(name)
        if what == "flush_names":
            for each in [each for each in self.late if each[0] in (rank, None)]:
                change(self.flushed, *each[1:])
                self.late.remove(each)
        elif what == "write":
            number = len(self.texts) if number is None else number
            self.texts[number] = given[0], False
            self.name(rank, name, number)
        elif number is None:
            raise Wrong(f"rank {rank} calls {what}, and there is no {name!r}", "Under which name is it now?")
        elif what == "flush":
            self.texts[number] = self.texts[number][0], True
        else:
            self.name(rank, name, None)
            if what == "rename":
                self.name(rank, given[0], number)

    def name(self, rank: int, name: str, number: int | None) -> None:
        change(self.now, name, number)
        self.late.append((rank, name, number))

    def meet(self) -> None:
        self.late[:] = [(None, *each) for _, *each in self.late]

    def nbytes(self) -> int:
        return sum(nbytes(self.texts[number][0]) for number in self.now.values())

    def left(self) -> Iterator[dict[str, Content | str]]:
        for names in self.now, self.flushed:
            texts = {name: self.texts[number] for name, number in names.items()}
            yield {name: content if flushed else TORN for name, (content, flushed) in texts.items()}


def cuts(files: Files, calls: Sequence[Sequence[Call]]) -> Iterator[tuple[str, Files]]:
    """Yield (moment in words, files) of each moment that is tested.

    For each rank, these are the moments before its first call and after each of its calls; at such a moment the other
    ranks have made none of their calls, or all of them.  The last moment is the one after all calls of all ranks.
    """
    for rank, mine in enumerate(calls):
        for others in "the others have not begun", "the others are ready":
            for made in range(len(mine) + 1):
                made_by = dict(enumerate(calls)) if others.endswith("ready") else {}
                begun = f"has made its {mine[made - 1][0]}" if made else "has not begun"
                yield f"rank {rank} {begun}, {others}:", files.after(made_by | {rank: mine[:made]})


def require_own(calls: Sequence[Sequence[Call]]) -> None:
    whose: dict[str, int] = {}
    for rank, mine in enumerate(calls):
        for what, *names in mine:
            for name in names[:1] if what == "write" else names:
                if whose.setdefault(name, rank) != rank:
                    raise Wrong(
                        f"ranks {whose[name]} and {rank} both touch {name!r} between two meetings",
                        "Which of them comes first, and what says so?",
                    )
