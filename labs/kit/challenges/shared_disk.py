"""A disk that several ranks share, and what the loss of power at any moment may leave there.

Between two meetings nothing says whose call comes first: one rank may have made all of its own and another none, and
two may not touch one file.  What was not flushed is torn.  Names are as they are, or as they were flushed: those that a
rank has changed itself, and all that were changed before the last meeting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from labs.kit.checks.answer import Wrong, show

LATENCY, BANDWIDTH, ENTRY = 0.5e-3, 8e6, 16  # s for each flush, bytes/s of a rank, bytes for the name of a piece
TORN = "torn"
Piece = tuple[str, int]  # the name of a tensor, and the first of these rows
Content = Mapping[Piece, Tensor | str]
Call = tuple[Any, ...]  # what, and with what


class Disk:
    """What a rank can do.  room: bytes for all files; meetings: its calls, from meeting to meeting."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.meetings: list[list[Call]] = [[]]

    def write(self, name: str, content: Content) -> None:
        """A new file, or an old one's new content: for each piece a tensor; in an index, the name of its file."""
        if not isinstance(content, dict) or not all(isinstance(each, Tensor | str) for each in content.values()):
            raise ValueError(f"{name!r} was given {show(content)}: a tensor, or the name of a file, for each piece")
        kept = {key: each.detach().clone() if isinstance(each, Tensor) else each for key, each in content.items()}
        self.note("write", name, kept)

    def flush(self, name: str) -> None:
        self.note("flush", name)

    def rename(self, old: str, new: str) -> None:
        self.note("rename", old, new)

    def remove(self, name: str) -> None:
        self.note("remove", name)

    def flush_names(self) -> None:
        self.note("flush_names")

    def meet(self, brought: Any = None) -> list[Any]:
        """Wait for all ranks.  What each of them has brought, by rank."""
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, brought)
        self.meetings.append([])
        return told

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
    """texts: by number, what is in a file, and whether it was flushed; now and flushed: numbers by name.

    late: changes of names that were not flushed, and by which rank; None: before the last meeting.
    """

    texts: dict[int, tuple[Content, bool]] = field(default_factory=dict)
    now: dict[str, int] = field(default_factory=dict)
    flushed: dict[str, int] = field(default_factory=dict)
    late: list[tuple[int | None, str, int | None]] = field(default_factory=list)

    def after(self, made: Mapping[int, Sequence[Call]]) -> Files:
        """made: calls, by rank."""
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
    """After each call of each rank, while the others have made none of theirs, or all; at last, all have."""
    for rank, mine in enumerate(calls):
        for others in "the others have not begun", "the others are ready":
            for made in range(len(mine) + 1):
                due = dict(enumerate(calls)) if others.endswith("ready") else {}
                begun = f"has made its {mine[made - 1][0]}" if made else "has not begun"
                yield f"rank {rank} {begun}, {others}:", files.after(due | {rank: mine[:made]})


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
