"""A simulated disk that notes after each call all files that a power cut at that moment could leave on it.

    texts    a file that was written and not flushed has its old text, nothing, half of the new text, or all of it
    names    are those after the first few calls since the last flush_names: a journaling file system writes names
             late, and keeps their order

A real disk may write a file's name before its text, so the disk here combines all such texts and names.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

State = dict[str, str]  # {name: text}
Call = tuple[str, ...]  # the disk's method, and the names of files that the call was given


@dataclass(frozen=True)
class PowerCut:
    """A power cut after some calls to the disk, and the files that it has left.

    now: the files as a program would have read them at that moment.
    left: the files after the power cut.
    over: whether the learner's function had returned.
    """

    calls: list[Call]
    now: State
    left: State
    over: bool = False


class File:
    """A file: the texts that the disk may hold for the file; the last is the one that was written last."""

    def __init__(self, text: str) -> None:
        self.texts = [text]


class FlushedDisk:
    """A disk whose files, at the beginning, are all flushed."""

    def __init__(self, before: State) -> None:
        self.files = {name: File(text) for name, text in before.items()}
        self.on_disk = [self.files]  # the names that may be on the disk; the last are the current ones
        self.calls: list[Call] = []
        self.cuts: list[PowerCut] = []

    def write(self, name: str, text: str) -> None:
        if name not in self.files:
            self.change(self.files | {name: File("")})
        self.files[name].texts += ["", text[: len(text) // 2], text]
        self.note("write", name)

    def flush(self, name: str) -> None:
        del self.file(name).texts[:-1]
        self.note("flush", name)

    def rename(self, old: str, new: str) -> None:
        file = self.file(old)
        self.change(self.all_but(old) | {new: file})
        self.note("rename", old, new)

    def flush_names(self) -> None:
        del self.on_disk[:-1]
        self.note("flush_names")

    def remove(self, name: str) -> None:
        self.file(name)
        self.change(self.all_but(name))
        self.note("remove", name)

    def names(self) -> list[str]:
        return sorted(self.files)

    def file(self, name: str) -> File:
        if name not in self.files:
            raise FileNotFoundError(f"there is no {name!r}, only {', '.join(map(repr, self.names()))}")
        return self.files[name]

    def all_but(self, name: str) -> dict[str, File]:
        return {other: file for other, file in self.files.items() if other != name}

    def change(self, files: dict[str, File]) -> None:
        self.files = files
        self.on_disk.append(files)

    def note(self, *call: str) -> None:
        """Note a call to the disk, and the power cuts that are possible after the call."""
        self.calls.append(call)
        self.cuts += self.cut()

    def cut(self, over: bool = False) -> list[PowerCut]:
        """Return the power cuts that are possible at this moment, one for each state that may be left."""
        now = {name: file.texts[-1] for name, file in self.files.items()}
        return [PowerCut(list(self.calls), now, left, over) for left in each_once(self.states())]

    def states(self) -> Iterable[State]:
        """Yield the states, {name: text}, that a power cut may leave on the disk; some come more than once."""
        for files in self.on_disk:
            for texts in product(*(file.texts for file in files.values())):
                yield dict(zip(files, texts, strict=True))


def each_once(states: Iterable[State]) -> list[State]:
    found: list[State] = []
    for state in states:
        found += [state] * (state not in found)
    return found
