"""replace: let a file have another text, so that a power cut at any moment leaves the old text or the new one, whole.

The check knows from a disk of its own (_power_cut) what a power cut may leave.  On each of these states it calls the
function again, with another text, as a restarted job would; there, too, the power may fail at any moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from labs.exercises.checkpoint._power_cut import FlushedDisk, PowerCut, State, each_once
from labs.exercises.engine.answer import Mistake, answered, first
from labs.exercises.engine.by_script import Play, as_found, checked, first_wrong, on_one_rank
from labs.exercises.engine.on_ranks import Draw
from labs.exercises.engine.scripts import Look, World

AGAIN = "it was called again, after a power cut"


@dataclass(frozen=True)
class Replaced(World):
    """A file that gets the first of the texts, and after a power cut the second.

    old: the text of the file before, or None if there is no such file.
    beside: the other files; the name of one of them begins with this file's name.
    """

    name: str
    old: str | None
    texts: tuple[str, str]

    @property
    def beside(self) -> State:
        return {f"{self.name}0": "another run", "rank-0": "numbers"}

    @property
    def before(self) -> State:
        return self.beside | ({} if self.old is None else {self.name: self.old})

    def __str__(self) -> str:
        return f"{self.name!r} {said(self.old)}, and is to have {self.texts[0]!r}"


def worlds(draw: Draw) -> dict[int, list[Replaced]]:
    run, step = draw.random.randrange(10, 100), draw.random.randrange(10, 1000)
    short, text, long = (f"step {step + i}, loss {draw.random.random():.{3 * i + 1}f}" for i in range(3))

    def case(old: str | None, *texts: str, only: str = "") -> Replaced:
        return draw.world(Replaced, 1, name=f"run-{run}", old=old, texts=texts, only=only)

    return {
        1: [
            case(short, text, long),
            case(long, text, short),
            case(None, text, long, only="right only where the file is there"),
            case(text, "", long, only="right only where there is a text"),
        ]
    }


def script(world: Replaced, fn: Callable[..., Any]) -> Iterator[Look | None]:
    yield None
    first = played(world, fn, world.texts[0], world.before)
    counts = {"calls": len(first[-1].cut.calls), "states": sum(not each.cut.over for each in first)}
    yield Look(facts=counts | first_wrong(MISTAKES, all_left(world, fn, first)))


def all_left(world: Replaced, fn: Callable[..., Any], first: list[Left]) -> Iterator[tuple[str, Left]]:
    """Yield the disk after each power cut, in the first call and in calls after a power cut, with words for where."""
    yield from (("", each) for each in first)
    for state in each_once(each.cut.left for each in first):
        there = {name: text for name, text in state.items() if name not in world.beside}
        try:
            again = played(world, fn, world.texts[1], state)
        except Exception as error:
            error.add_note(f"({AGAIN} that left {there})")
            raise
        yield from ((f"a power cut had left {there}; ", each) for each in again)


def played(world: Replaced, fn: Callable[..., Any], text: str, before: State) -> list[Left]:
    """Call the function on a disk with these files; return the disk after each power cut."""
    disk = FlushedDisk(before)
    fn(disk, world.name, text)
    return [Left(world, text, before, cut) for cut in (*disk.cuts, *disk.cut(over=True))]


@dataclass(frozen=True)
class Left:
    """The files on a disk after a power cut, or after the call.

    text: the text that the file should get in this call.
    before: the files before the call, by name.
    """

    world: Replaced
    text: str
    before: State
    cut: PowerCut

    @property
    def old(self) -> str | None:
        return self.before.get(self.world.name)

    @property
    def now(self) -> str | None:
        return self.cut.now.get(self.world.name)

    @property
    def received(self) -> str | None:
        return self.cut.left.get(self.world.name)

    @property
    def lost(self) -> bool:
        return self.received not in ((self.text,) if self.cut.over else (self.old, self.text))

    @property
    def torn(self) -> bool:
        return self.lost and self.received not in (self.old, None)

    def called(self, *begin: str) -> bool:
        return any(call[: len(begin)] == begin for call in self.cut.calls)

    @property
    def away(self) -> str:
        """Return the name to which the replaced file was renamed, or "" if it kept its name."""
        return next((call[2] for call in self.cut.calls if call[:2] == ("rename", self.world.name)), "")

    @property
    def flushed(self) -> bool:
        """Return whether the new file was flushed under its old name, before it got the replaced file's name."""
        came = [call[1] for call in self.cut.calls if call[0] == "rename" and call[2] == self.world.name]
        return any(self.called("flush", name) for name in came)

    @property
    def description(self) -> str:
        calls = [f"{what}({', '.join(map(repr, names))})" for what, *names in self.cut.calls]
        expected = repr(self.text) if self.cut.over or self.old is None else f"{self.old!r} or {self.text!r}"
        when = f"after {', '.join(calls) or 'no call'}" + " and its return" * self.cut.over
        return f"{when} the power goes\nand leaves this: {self.world.name!r} {said(self.received)}; {expected} is due"


def said(text: str | None) -> str:
    return "is not there" if text is None else f"has {text!r}"


def describe(matches: Callable[[Left], Any]) -> Callable[[Left], str | None]:
    """Return a row's test, which describes the disk after the power cut if `matches`."""
    return lambda its: its.description if matches(its) else None


def changed(its: Left) -> str | None:
    """Return a sentence about another file that has changed, or None."""
    left, expected = its.cut.left, its.world.beside.items()
    return first(
        f"{name!r} had {text!r}, and {said(left.get(name))}" for name, text in expected if left.get(name) != text
    )


def more(had: bool) -> Callable[[Left], str | None]:
    """Return a row's test: whether files are left after the call that should not be there.

    had: whether an earlier power cut had left these files, and not this call.
    """

    def matches(its: Left) -> str | None:
        expected = (its.world.name, *its.world.beside)
        names = [name for name in its.cut.now if name not in expected and (name in its.before) == had]
        return f"when it has returned, {names[0]!r} is there" if its.cut.over and names else None

    return matches


# fmt: off
BETWEEN = "And if the power goes between these two calls?"
MISTAKES = (
    Mistake("another file is gone", "Whose are the other names on this disk?", changed),
    Mistake("overwritten in place", "Where is the old text, while the new one is on its way to the disk?",
            describe(lambda its: its.torn and its.called("write", its.world.name)),
            symptom="after a crash a file of length 0, or half of one, where the last checkpoint was"),
    Mistake("the old one is removed first", BETWEEN,
            describe(lambda its: its.lost and its.received is None and its.called("remove", its.world.name)),
            symptom="after a crash neither the old checkpoint nor the new one"),
    Mistake("renamed the wrong way round", "Which of the two names is there before, and which one afterwards?",
            describe(lambda its: its.lost and its.received is None and its.away and its.called("write", its.away))),
    Mistake("the old one is renamed first", BETWEEN, describe(lambda its: its.lost and its.received is None
        and its.away),
            symptom="after a crash the checkpoint has another name, which no program asks for"),
    Mistake("what a power cut has left is taken for the text", "Who has written that, and had it come to an end?",
            describe(lambda its: its.torn and not its.called("write"))),
    Mistake("another text", "Which text was the file to have?",
            describe(lambda its: its.torn and its.now not in (None, its.old, its.text))),
    Mistake("another file is flushed", "Under which name is the new text, at this moment?",
            describe(lambda its: its.torn and its.called("flush") and not its.flushed)),
    Mistake("renamed before the flush", "Where is the text, when the new name is on the disk already?",
            describe(lambda its: its.torn), symptom="after a crash the file has its new name, and length 0"),
    Mistake("nothing is written", "Where does the new text go?",
            describe(lambda its: its.cut.over and its.lost and not its.called("write"))),
    Mistake("never renamed", "Under which name is the new text now, and under which one will it be looked for?",
            describe(lambda its: its.cut.over and its.now != its.text)),
    Mistake("the names are flushed too early", "Which call changes a name last, and who brings that to the disk?",
            describe(lambda its: its.lost and its.called("flush_names"))),
    Mistake("the names are never flushed", "The text is on the disk. Under which name is it there?",
            describe(lambda its: its.lost), symptom="it was said to be saved, and after a crash the old one is there"),
    Mistake("a draft is left behind", "How many files are there, when you have saved a thousand times?",
            more(had=False)),
    Mistake("what a power cut has left stays", "Which names may be there, when the job is started anew?",
            more(had=True), symptom="a disk that fills up with drafts, one for each crash"),
)
RAISED = (
    Mistake("it fails after a power cut", "Which names may be there, when the job is started anew?",
            lambda text: AGAIN in text),
)
# fmt: on
ON_DISK = "What is on the disk, when the power goes at this moment?"
PLAY = Play(worlds, script, ((on_one_rank, as_found(MISTAKES)),), ON_DISK, raised=RAISED)


@answered
def replace(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn(disk, name, text)`: the file gets this text; at every moment it has the old text or the new one, whole.

    A disk has write(name, text), flush(name), rename(old, new), flush_names(), remove(name) and names().

    Returns the text of the ✓ line, with the number of states that a power cut may leave.
    """
    facts = checked(PLAY, (fn,), seed).seen[0].done[0].facts
    return (
        f"{facts['calls']} calls; in each of the {facts['states']} states that a power cut between them may leave, the "
        "old text or the new one is there, whole"
    )
