"""Answers to the exercises, right and wrong: one file per exercise, each answer once.

    python -m tests.answers                  prints for each exercise how many wrong answers are caught, and how many
                                             with their name, and how many right ones are accepted
    python -m tests.answers broadcast clip   prints the same for these exercises

tests/exercises/<chapter>/<name>.py has the answers that `make test` tries: right ones built differently, and a wrong
one with each name.  archive.zip, beside this file, has all answers that were ever written: `make soak` tries them.

A wrong answer stands beside the name by which its check must call it, or "" if any rejection will do.  Most are
answers that people write: the mistakes were seen in courses and repositories, or are one slip away from a right answer.
The latter are written as a right answer in which some words are replaced:

    answers = Exercise("average_gradients")

    @answers.right
    def by_all_reduce(model):
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()

    answers.spoil(by_all_reduce, "summed instead of averaged", {"p.grad /= dist.get_world_size()": "pass"})

    @answers.wrong("nothing synchronised")
    def local_only(model): ...

The answer of the notebook is not written again: `from_notebook("average_gradients")` reads it in solutions/.
Wrong values that a check itself computes, to recognise a mistake, are not written again: `answers.instead(MISTAKES)`.

blind: written by somebody who had seen the notebooks and nothing of the checks; the published share is that of these.
    Only the archive says so.
alone: the answer ends or hangs its job, or leaves something behind.
"""

import ast
import inspect
import linecache
import re
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
    """An answer: the functions that a check is given, and what the check must say.

    line: the beginning of the ✓ line, after the exercise's name, for a right answer.
    """

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
        """Return whether the check has said what it must.

        It must accept a right answer, and reject a wrong one with a question, and by its name if it has one.  A
        NameError does not count: it says nothing about the check.
        """
        if self.right:
            return said.ok is True and said.text.startswith(self.line)
        named = not self.mistake or str(said).startswith(f"✗ {self.check}: {self.mistake}\n")
        told = said.question and said.text and said.seed is not None and "NameError" not in said.text
        return said.ok is False and named and bool(told)


class Exercise:
    """The answers to one exercise.

    given: returns the functions that the check is given, from what was written.
    needs: skips the test if the extra that these answers use is not installed.
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
        """Note a right answer, by `@right` or `@right(line="…", blind=True)`; return it, or the decorator."""
        return self.note(True, **options) if fn is None else self.note(True, **options)(fn)

    def wrong(self, mistake: str = "", **options: Any) -> Callable[..., Any]:
        """Return a decorator that notes a wrong answer, and the name by which its check must call it."""
        return self.note(False, mistake=mistake, **options)

    def spoil(
        self, fn: Callable[..., Any], mistake: str, changes: Mapping[str, str], **options: Any
    ) -> Callable[..., Any]:
        """Note a wrong answer: `fn` with each key of `changes` replaced in its text; return the new function."""
        return self.wrong(mistake, **options)(exchanged(fn, changes, f"{fn.__name__}_{len(self.answers)}"))

    def vary(self, fn: Callable[..., Any], changes: Mapping[str, str], **options: Any) -> Callable[..., Any]:
        """Note a right answer, made as by `spoil`; return the new function."""
        return self.right(exchanged(fn, changes, f"{fn.__name__}_{len(self.answers)}"), **options)

    def slips(self, fn: Callable[..., Any], *words: str, **given: Any) -> Callable[..., Callable[..., Any]]:
        """Return a `slip(mistake, *changes)` that spoils `fn`.

        changes: a mapping; or old, new, old, new, …; or, if there are `words`, the lines that replace each of them,
            which are indented as deep
        """

        def slip(mistake: str, *changes: Any, **options: Any) -> Callable[..., Any]:
            if words:
                pairs = zip(words, (text.replace("\n", "\n    ") for text in changes), strict=True)
            else:
                pairs = changes[0].items() if len(changes) == 1 else zip(changes[::2], changes[1::2], strict=True)
            return self.spoil(fn, mistake, dict(pairs), **given | options)

        return slip

    def instead(self, table: Iterable[Mistake]) -> None:
        """Note the wrong answers that the check itself computes, for the rows of its table that have some."""
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
    """Return `fn`, a function or a class, with other words in its text; they are indented as they stand there.

    Raises ValueError if a word does not stand there exactly once.
    """
    text = text_of(fn)
    for old, new in changes.items():
        if text.count(old) != 1:
            raise ValueError(f"{old!r} stands {text.count(old)} times in {fn.__name__}: it is to stand there once")
        text = text.replace(old, new)
    file = f"<{fn.__module__}.{name}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # The new function is not the module's own, so that it travels to the ranks by value.
    known, imports = dict(vars(sys.modules[fn.__module__])), getattr(fn, "imports", "")
    exec(imports, known)
    exec(compile(text, file, "exec"), known)
    made = known[fn.__name__]
    made.__name__ = made.__qualname__ = name
    made.imports = imports
    return made


@cache
def text_of(fn: Any) -> str:
    """Return the source of a function or a class, without its decorators."""
    if hasattr(fn, "text"):
        return fn.text
    lines = textwrap.dedent(inspect.getsource(fn)).splitlines(keepends=True)
    return "".join(lines[next(i for i, line in enumerate(lines) if line.startswith(("def ", "class "))) :])


def from_notebook(name: str) -> Any:
    """Return the function or class `name` with the answer that its notebook has, and without its docstrings.

    The answer finds the names that it uses among the notebook's imports, and in the module of the caller.
    """
    known, (text, imports) = dict(sys._getframe(1).f_globals), text_in_notebook(name)
    file = f"<{known['__name__']}, from the notebook>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(imports, known)
    exec(compile(text, file, "exec"), known)
    known[name].text, known[name].imports = text, imports
    return known[name]


@cache
def text_in_notebook(name: str) -> tuple[str, str]:
    """Return the answer's text, and those of its notebook's imports whose names the text has."""
    for path in sorted((ROOT / "solutions").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        found = ast.parse(source).body if re.search(rf"^(def|class) {name}\b", source, re.MULTILINE) else []
        for node in found:
            text = ast.get_source_segment(source, node)
            if getattr(node, "name", "") == name and "### BEGIN SOLUTION" in text:
                return without_words(text), imports_of(found, text)
    raise ValueError(f"no notebook in solutions/ has an answer called {name}")


def imports_of(body: list[ast.stmt], text: str) -> str:
    used = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
    found = [node for node in body if isinstance(node, ast.Import | ast.ImportFrom)]
    for node in found:
        node.names = [each for each in node.names if (each.asname or each.name.split(".")[0]) in used]
    return "\n".join(ast.unparse(node) for node in found if node.names)


def without_words(text: str) -> str:
    """Return a definition without its docstrings, and without the marks around the answer."""
    left_out = {n for n, line in enumerate(text.splitlines(), 1) if line.endswith(" SOLUTION")}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            left_out |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    return "".join(line for n, line in enumerate(text.splitlines(keepends=True), 1) if n not in left_out) + "\n"


ARCHIVE = Path(__file__).with_name("archive.zip")


def exercises() -> dict[str, Exercise]:
    """Import tests/exercises; return the exercises by the names of their checks."""
    return found(
        f"tests.exercises.{chapter}.{name}" for chapter in labs.exercises.CHAPTERS for name in answered(chapter)
    )


def answered(chapter: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "tests/exercises" / chapter).glob("[a-z]*.py"))


def archived() -> dict[str, Exercise]:
    """Import the archive; return all answers on which the checks were ever tried, by the names of their checks."""
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
    """Return pairs of an answer and what its check says; without a seed, each check draws other inputs."""
    said = together([(answer.check, answer.functions, answer.alone, answer.right) for answer in answers], seed)
    return list(zip(answers, said, strict=True))


def misjudged(answers: list[Answer], seed: int | None = SEED) -> str:
    """Return the answers of which a check did not say what it must, with what it said, as text."""
    return "\n\n".join(
        f"{answer.name}: wanted {'✓ ' + answer.line if answer.right else repr(answer.mistake)}\n{said}"
        for answer, said in tried(answers, seed)
        if not answer.met(said)
    )
