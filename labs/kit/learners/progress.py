"""A learner's progress: two small files in the course's folder.

    noted("broadcast", True)     notes what a check has answered to a learner's notebook
    report(course)               the exercises of each notebook: the time at which each was passed, and the tries
    classroom(course, learners)  for a teacher: the number of exercises that each learner has passed, by notebook
    course_map()                 for notebook 00: links to the notebooks, and the exercises that are passed

    progress.json                {"broadcast": "2026-11-20 14:05", ...}: the first time that each exercise was passed
    tries.json                   {"broadcast": {"tries": 3, "mistake": "the last one's name", "last": its time}, ...}:
                                 the number of tries, up to the first that passed

In both files, the exercise that was noted last stands last.  Neither code nor a name of a person is kept.  If
LABS_PROGRESS is anything but "on" in the environment, nothing is kept at all; "on" is the default.

A notebook's exercises are the checks that its cells call.  If the files are lost, the course still works.
"""

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from labs.kit.drawing.tables import Table, table

FILE = "progress.json"
TRIES = "tries.json"
FOLDER = "notebooks"  # the folder of the learner's notebooks; nothing is noted in solutions/ and in tests
CHECK = re.compile(r"\bcheck\.(?!predict\b)(\w+)\(")
Progress = dict[str, str]
Tries = dict[str, dict[str, Any]]
KEPT = (
    "The course keeps, in this folder alone: when you passed an exercise, the number of tries, the name\n"
    "of the last mistake, and the scores of challenges. No code is kept. LABS_PROGRESS=off in the\n"
    "environment keeps nothing more."
)
OFF = "LABS_PROGRESS is off: nothing is kept."


@dataclass(frozen=True)
class Notebook:
    file: str  # "02_collectives.ipynb"
    number: str  # "02"
    title: str  # "02 Collectives"
    exercises: tuple[str, ...]  # the names of the exercises' checks


# ---- the file --------------------------------------------------------------------------------------------


def noted(exercise: str, ok: bool | None, mistake: str = "") -> None:
    """Note what a check has answered, if a learner's notebook runs and the exercise was not passed before.

    ok: None for a stub that is untouched, which is no try.
    mistake: the name of the mistake, or "".
    """
    try:
        if ok is not None and (course := learners_course()):
            add(course, exercise, ok, mistake)
    except OSError:
        pass  # the folder cannot be written to, but the check still gives its answer


def is_kept() -> bool:
    return os.environ.get("LABS_PROGRESS", "on") == "on"


def learners_course() -> Path | None:
    """Return the course's folder if this process runs in its notebooks/, as the notebooks' kernels do, else None.

    None is returned as well if nothing is to be kept.
    """
    here = Path.cwd()
    return here.parent if here.name == FOLDER and is_kept() else None


def add(course: Path, exercise: str, ok: bool = True, mistake: str = "") -> None:
    now = datetime.now().isoformat(" ", "minutes")
    with alone_in(course):
        done, tries = (readable(course, *each) for each in FILES)
        if exercise in done:
            return
        if ok:
            write(course, done | {exercise: now})
        number = tries.pop(exercise, {"tries": 0})["tries"] + 1
        write(course, tries | {exercise: {"tries": number, "mistake": mistake, "last": now}}, TRIES)


@contextmanager
def alone_in(course: Path) -> Iterator[None]:
    """Hold a lock on the course's folder, so that no other thread or process writes a file in the meantime."""
    folder = os.open(course, os.O_RDONLY)
    try:
        with suppress(OSError):  # the file system may have no locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def is_time(value: Any) -> bool:
    return isinstance(value, str)


def is_tried(value: Any) -> bool:
    """Return whether a value of tries.json is one that `add` can have written."""
    if not isinstance(value, dict):
        return False
    number, words = value.get("tries"), (value.get("mistake"), value.get("last"))
    return type(number) is int and number > 0 and all(isinstance(each, str) for each in words)


FILES = ((FILE, is_time), (TRIES, is_tried))


def readable(course: Path, file: str, valid: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the content of a file, or nothing if it is broken: `add` then begins it anew."""
    try:
        return read(course, file, valid)
    except ValueError:
        return {}


def read(course: Path, file: str = FILE, valid: Callable[[Any], bool] = is_time) -> dict[str, Any]:
    """Return the content of progress.json, {exercise: time}, or of another JSON file in the course's folder.

    valid: a function that returns whether a value of the file is valid.
    Raises ValueError for a file that `write` cannot have written.
    """
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
    """Write a JSON file under another name and rename it, so that a reader always finds a complete file."""
    draft = course / f"{file}.{os.getpid()}"
    try:
        draft.write_text(json.dumps(progress, indent=1) + "\n", encoding="utf-8")
        os.replace(draft, course / file)
    finally:
        draft.unlink(missing_ok=True)


# ---- the notebooks ---------------------------------------------------------------------------------------


def notebooks(course: Path) -> list[Notebook]:
    """Return the notebooks in the order of the course, without copies that a learner made under other names."""
    paths = sorted((course / FOLDER).glob("[0-9]*.ipynb"))
    return [notebook(path) for path in paths if re.fullmatch(r"\d\d[a-z]?_\w+", path.stem)]


def notebook(path: Path) -> Notebook:
    """Return a notebook's title and exercises.  Raises ValueError if the file cannot be read as a notebook."""
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
    """Return a table of all exercises of all notebooks: when each was passed, or "not yet", and the tries."""
    done, tries = (read(course, *each) for each in FILES)
    rows = []
    for each in notebooks(course):
        for name in each.exercises:
            tried = tries.get(name, {"tries": None, "mistake": ""})
            row = {"notebook": each.title, "exercise": name, "passed": done.get(name, "not yet")}
            rows.append(row | {"tries": tried["tries"], "last mistake": tried["mistake"]})
    exercises = {row["exercise"] for row in rows}
    count = f"{len(exercises & done.keys())} of {len(exercises)} exercises passed"
    return replace(table(rows), notes=(count, "", KEPT if is_kept() else OFF))


def classroom(course: Path, learners: Sequence[Path]) -> Table:
    """Return a table of the number of exercises that each learner has passed, by notebook.

    learners: the folder of each learner's course.
    """
    rows = []
    for folder in learners:
        if not folder.is_dir():
            raise ValueError(f"there is no folder {folder}: name the folder of each learner's course")
        done = read(folder)
        counts = {each.number: share(each, done) for each in notebooks(course) if each.exercises}
        rows.append({"passed": str(folder), **counts})
    return table(rows)


def share(each: Notebook, done: Progress) -> str:
    return f"{sum(name in done for name in each.exercises)} of {len(each.exercises)}" if each.exercises else "–"


@dataclass(frozen=True, repr=False)
class CourseMap:
    """A table of a course's notebooks, each with its exercises; passed exercises are bold."""

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
    """Return the map of the course whose notebook calls this function; in solutions/, no exercise counts as passed."""
    found, course = tuple(notebooks(Path.cwd().parent)), learners_course()
    try:
        return CourseMap(found, read(course) if course else {}, "" if is_kept() else OFF)
    except (OSError, ValueError) as error:
        return CourseMap(found, {}, str(error))


def course_here() -> Path:
    """Return the folder of the course: the working directory, or a folder around it.

    Raises ValueError if none of these folders has notebooks.
    """
    here = Path.cwd()
    course = next((folder for folder in (here, here.parent) if list(folder.glob(f"{FOLDER}/*.ipynb"))), None)
    if course is None:
        raise ValueError(f"there are no {FOLDER} in {here}: run this in the course's folder")
    return course
