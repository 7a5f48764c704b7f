"""What a learner has passed, and when: a small file in the course's folder, that nothing else needs.

    passed("broadcast")    a check says so when it has said ✓; noted only where a learner's notebook runs
    report(course)         the exercises of each notebook: passed and when, or not yet
    classroom(courses)     for a teacher: how many exercises each learner has passed, by notebook
    course_map()           for notebook 00: links to the notebooks, and what is passed

    progress.json          {"broadcast": "2026-11-20 14:05", ...}: when each exercise was passed for the first time

The notebooks themselves say which exercises there are, by the checks that their cells call.
"""

import fcntl
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from labs.kit.drawing.tables import Table, table

FILE = "progress.json"
FOLDER = "notebooks"  # those of the learner; in solutions/, as in tests, nobody learns
CHECK = re.compile(r"\bcheck\.(?!predict\b)(\w+)\(")
Progress = dict[str, str]


@dataclass(frozen=True)
class Notebook:
    file: str  # "02_collectives.ipynb"
    number: str  # "02"
    title: str  # "02 Collectives"
    exercises: tuple[str, ...]  # by the names of their checks


# ---- the file --------------------------------------------------------------------------------------------


def passed(exercise: str) -> None:
    """Note it with the time, where a learner's notebook runs and it was not noted before."""
    try:
        if course := learners_course():
            add(course, exercise)
    except OSError:
        pass  # in a folder that cannot be written to, a check still says what it has to say


def learners_course() -> Path | None:
    """The folder of the course in whose notebooks/ this process works, as the kernels of its notebooks do."""
    here = Path.cwd()
    return here.parent if here.name == FOLDER else None


def add(course: Path, exercise: str) -> None:
    with alone_in(course):
        try:
            found = read(course)
        except ValueError:
            found = {}  # broken: it begins anew
        if exercise not in found:
            write(course, found | {exercise: datetime.now().isoformat(" ", "minutes")})


@contextmanager
def alone_in(course: Path) -> Iterator[None]:
    """Let no other thread or process note anything there while the body runs, which reads, and writes what it read."""
    folder = os.open(course, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def is_time(value: Any) -> bool:
    return isinstance(value, str)


def read(course: Path, file: str = FILE, valid: Callable[[Any], bool] = is_time) -> dict[str, Any]:
    """What is passed there, and when.  Raises ValueError where the file is not what `write` has written."""
    try:
        found = json.loads((course / file).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(map(valid, found.values())):
        raise ValueError(f"{course / file} is broken: delete it, and run the checks again that you have passed")
    return found


def write(course: Path, progress: Mapping[str, Any], file: str = FILE) -> None:
    """By a renaming: whoever reads meanwhile, or is killed, finds the old file or the new one."""
    draft = course / f"{file}.{os.getpid()}"
    try:
        draft.write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, course / file)
    finally:
        draft.unlink(missing_ok=True)


# ---- the notebooks ---------------------------------------------------------------------------------------


def notebooks(course: Path) -> list[Notebook]:
    """Those of the course, in its order; copies that a learner has made have other names, and are left out."""
    paths = sorted((course / FOLDER).glob("[0-9]*.ipynb"))
    return [notebook(path) for path in paths if re.fullmatch(r"\d\d[a-z]?_\w+", path.stem)]


def notebook(path: Path) -> Notebook:
    """Raises ValueError where it cannot be read as a notebook."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is broken: `git restore {FOLDER}/{path.name}` brings a clean copy back") from None
    headings = re.findall("^# (.*)$", "\n".join(text for kind, text in sources if kind == "markdown"), re.MULTILINE)
    calls = CHECK.findall("\n".join(text for kind, text in sources if kind == "code"))
    number, _, name = path.stem.partition("_")
    title = f"{number} {headings[0].split(':')[0] if headings else name}"
    return Notebook(path.name, number, title, tuple(dict.fromkeys(calls)))


# ---- what it says ----------------------------------------------------------------------------------------


def report(course: Path) -> Table:
    """Every exercise of every notebook: when it was passed, or not yet."""
    done = read(course)
    rows = [
        {"notebook": each.title, "exercise": name, "passed": done.get(name, "not yet")}
        for each in notebooks(course)
        for name in each.exercises
    ]
    exercises = {row["exercise"] for row in rows}
    count = f"{len(exercises & done.keys())} of {len(exercises)} exercises passed"
    return replace(table(rows), notes=(count,))


def classroom(course: Path, learners: Sequence[Path]) -> Table:
    """How many exercises of each notebook are passed; learners: the folders of their courses."""
    rows = []
    for folder in learners:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}")
        done = read(folder)
        counts = {each.number: share(each, done) for each in notebooks(course) if each.exercises}
        rows.append({"passed": str(folder), **counts})
    return table(rows)


def share(each: Notebook, done: Progress) -> str:
    return f"{sum(name in done for name in each.exercises)} of {len(each.exercises)}" if each.exercises else "–"


@dataclass(frozen=True, repr=False)
class CourseMap:
    """The notebooks that are there, each with its exercises, those that are passed in bold."""

    notebooks: tuple[Notebook, ...]
    done: Progress
    note: str = ""

    def __repr__(self) -> str:
        return "\n".join([*(f"{each.title}: {share(each, self.done)}" for each in self.notebooks), self.note]).rstrip()

    def _repr_html_(self) -> str:
        columns = ("notebook", "passed", "exercises")
        head = "".join(f'<th scope="col" style="text-align: left">{each}</th>' for each in columns)
        rows = "\n".join(
            f'<tr><td style="text-align: left"><a href="{escape(each.file)}">{escape(each.title)}</a></td>'
            f'<td style="text-align: left">{share(each, self.done)}</td>'
            f'<td style="text-align: left">{self.marked(each)}</td></tr>'
            for each in self.notebooks
        )
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table>\n{escape(self.note)}"

    def marked(self, each: Notebook) -> str:
        return ", ".join(f"<b>✓ {name}</b>" if name in self.done else name for name in each.exercises)


def course_map() -> CourseMap:
    """Of the course whose notebook calls it.  In solutions/ nothing is passed, whoever has done what."""
    found, course = tuple(notebooks(Path.cwd().parent)), learners_course()
    try:
        return CourseMap(found, read(course) if course else {})
    except (OSError, ValueError) as error:
        return CourseMap(found, {}, str(error))


def course_here() -> Path:
    """The course in or around this folder.  Raises ValueError where there is none."""
    here = Path.cwd()
    course = next((folder for folder in (here, here.parent) if list(folder.glob(f"{FOLDER}/*.ipynb"))), None)
    if course is None:
        raise ValueError(f"there are no {FOLDER} in {here}: call it in the course's folder")
    return course


def main(learners: Sequence[str]) -> int:
    """Print the report of the course in or around this folder; with folders of learners, theirs in short."""
    from labs.kit.challenges import scores  # which notes its own by this file

    try:
        course = course_here()
        print(classroom(course, [Path(each) for each in learners]) if learners else report(course))
        if not learners and (tried := scores.tried(course)):
            print(f"\n{tried}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
