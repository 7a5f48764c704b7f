"""Answers to the exercises, right and wrong: a file an exercise, each answer once.

    python -m tests.answers                  of each exercise: wrong ones caught, and named; right ones accepted
    python -m tests.answers broadcast clip   of these

tests/exercises/<chapter>/<name>.py has the answers that `make test` tries: right ones built differently, and a wrong
one with each name.  archive.zip, beside this file, has all that were ever written: `make soak` tries them.

A wrong answer stands beside the name by which its check must call it ("" where any rejection will do).  Most are what
people do write: the mistakes were seen in courses and repositories, or are one slip away from a right answer, and are
written like that, as a right answer of which some words are exchanged:

    answers = Exercise("average_gradients")

    @answers.right
    def by_all_reduce(model):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    answers.spoil(by_all_reduce, "summed instead of averaged", {"p.grad /= dist.get_world_size()": "pass"})

    @answers.wrong("nothing synchronised", blind=True)
    def local_only(model): ...

What a check itself computes, to know a mistake by it, is not written out again: `answers.instead(MISTAKES)`.

blind: by a writer who had seen the notebooks and nothing of the checks; of these comes the published share.
alone: it ends or hangs its job, or leaves something behind.
"""

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import labs.exercises
from labs.exercises.engine.answer import Answer as Said
from labs.exercises.engine.answer import Mistake
from tests.answers.together import SEED, together

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Answer:
    """What a check is given, and what it must say of it.  line: how what it says of a right answer goes on after ✓."""

    check: str
    name: str
    functions: tuple[Callable[..., Any], ...]
    right: bool
    _: KW_ONLY
    mistake: str = ""
    line: str = ""
    blind: bool = False
    alone: bool = False
    long: bool = False

    def met(self, said: Said) -> bool:
        """A right one is accepted; a wrong one rejected with a question, by its name where it has one.

        Words that nobody knows are wrong without saying anything of the check.
        """
        if self.right:
            return said.ok is True and said.text.startswith(self.line)
        named = not self.mistake or str(said).startswith(f"✗ {self.check}: {self.mistake}\n")
        told = said.question and said.text and said.seed is not None and "NameError" not in said.text
        return said.ok is False and named and bool(told)


class Exercise:
    """given: what the check is given of what was written, where that is more than one function.

    needs: skips the test where the extra is not installed that these answers use.
    """

    def __init__(
        self,
        check: str,
        given: Callable[..., tuple[Callable[..., Any], ...]] = lambda fn: (fn,),
        needs: Callable[[], None] = lambda: None,
    ) -> None:
        self.check, self.given, self.needs = check, given, needs
        self.answers: list[Answer] = []

    def right(self, fn: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        """`@right`, or `@right(line="…", blind=True)`."""
        return self.note(True, **options) if fn is None else self.note(True, **options)(fn)

    def wrong(self, mistake: str = "", **options: Any) -> Callable[..., Any]:
        return self.note(False, mistake=mistake, **options)

    def spoil(
        self, fn: Callable[..., Any], mistake: str, changes: Mapping[str, str], **options: Any
    ) -> Callable[..., Any]:
        """A wrong answer: `fn`, in whose text each key of `changes` stands once, and is exchanged for its value."""
        return self.wrong(mistake, **options)(exchanged(fn, changes, f"{fn.__name__}_{len(self.answers)}"))

    def vary(self, fn: Callable[..., Any], changes: Mapping[str, str], **options: Any) -> Callable[..., Any]:
        """As `spoil`, and right."""
        return self.right(exchanged(fn, changes, f"{fn.__name__}_{len(self.answers)}"), **options)

    def slips(self, fn: Callable[..., Any], *words: str, **given: Any) -> Callable[..., Callable[..., Any]]:
        """`spoil(fn, …)`, of a mapping, or of old, new, …; or of other lines in the place of these words, as deep."""

        def slip(mistake: str, *changes: Any, **options: Any) -> Callable[..., Any]:
            if words:
                pairs = zip(words, (text.replace("\n", "\n    ") for text in changes), strict=True)
            else:
                pairs = changes[0].items() if len(changes) == 1 else zip(changes[::2], changes[1::2], strict=True)
            return self.spoil(fn, mistake, dict(pairs), **given | options)

        return slip

    def instead(self, table: Iterable[Mistake]) -> None:
        """Wrong answers that the check itself computes: of its rows that are another answer, each by its name."""
        expected = self.answers[0].functions[0]
        for row in table:
            for number, other in enumerate(getattr(row.matches, "others", ())):
                fn = partial(with_part, expected, row.matches.part, other) if row.matches.part else other
                self.answers.append(Answer(self.check, f"{row.name} {number}", (fn,), False, mistake=row.name))

    def note(
        self, right: bool, given: Callable[..., Any] | None = None, **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def noted(fn: Callable[..., Any]) -> Callable[..., Any]:
            name = getattr(fn, "__name__", type(fn).__name__)
            self.answers.append(Answer(self.check, name, (given or self.given)(fn), right, **options))
            return fn

        return noted


def with_part(expected: Callable[..., Any], name: str, other: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    return expected(*arguments) | {name: other(*arguments)}


def exchanged(fn: Any, changes: Mapping[str, str], name: str) -> Any:
    """What `fn`, a function or a class, would be with other words in its text (indented as within it)."""
    text = text_of(fn)
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in {fn.__name__}: it is to stand there once")
        text = text.replace(old, new)
    file = f"<{fn.__module__}.{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # What is made is not the module's own, and travels to the ranks by value.
    known = dict(vars(sys.modules[fn.__module__]))
    exec(compile(text, file, "exec"), known)
    made = known[fn.__name__]
    made.__name__ = made.__qualname__ = name
    return made


@cache
def text_of(fn: Any) -> str:
    """Without its decorators."""
    lines = textwrap.dedent(inspect.getsource(fn)).splitlines(keepends=True)
    return "".join(lines[next(i for i, line in enumerate(lines) if line.startswith(("def ", "class "))) :])


ARCHIVE = Path(__file__).with_name("archive.zip")


def exercises() -> dict[str, Exercise]:
    """Import tests/exercises; return the exercises by the names of their checks."""
    return found(
        f"tests.exercises.{chapter}.{name}" for chapter in labs.exercises.CHAPTERS for name in answered(chapter)
    )


def answered(chapter: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "tests/exercises" / chapter).glob("[a-z]*.py"))


def archived() -> dict[str, Exercise]:
    """Import the archive: all answers that the checks have ever been tried on, blind ones included."""
    return found(archived_modules())


def archived_modules() -> list[str]:
    """Return the names of the archive's modules, which can be imported from now on."""
    if str(ARCHIVE) not in sys.path:
        sys.path.append(str(ARCHIVE))
    with ZipFile(ARCHIVE) as archive:
        files = [Path(name) for name in archive.namelist()]
    return [f"{file.parent}.{file.stem}" for file in files if file.stem != "__init__"]


def found(modules: Iterable[str]) -> dict[str, Exercise]:
    values = [each for module in modules for each in vars(import_module(module)).values()]
    return {each.check: each for each in values if isinstance(each, Exercise)}


def tried(answers: list[Answer], seed: int | None = SEED) -> list[tuple[Answer, Said]]:
    """What their checks say of them; drawn anew for each where there is no seed."""
    said = together([(answer.check, answer.functions, answer.alone, answer.right) for answer in answers], seed)
    return list(zip(answers, said, strict=True))


def misjudged(answers: list[Answer], seed: int | None = SEED) -> str:
    """Those that were not met, with what was said of them."""
    return "\n\n".join(
        f"{answer.name}: wanted {'✓ ' + answer.line if answer.right else repr(answer.mistake)}\n{said}"
        for answer, said in tried(answers, seed)
        if not answer.met(said)
    )
