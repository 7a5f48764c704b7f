"""A teacher's page and one to project: `make class FOLDERS="/home/*/training-labs"` writes both to build/class.

    index.html       learners × exercises: when each was passed, the tries, and the named mistake of the last one
    projected.html   a bar for each exercise, without names

The pages are made from what progress keeps in the folders of the learners' courses.  A learner is called as the folder
is, or, if all folders have the same name, as the folder around it is.  A learner stands at the exercise that was tried
last, or, if it was passed, at the next one that is not passed yet.  Which one was last is told by the order of the
files, so that a clock that is wrong does not matter.

The projected page shows the class only where no learner can be recognised: a number below FEW is "fewer than 3", one
that leaves fewer than FEW out is "nearly all", and smaller groups and their mistakes are not shown.  A class of fewer
than twice FEW is not shown at all, so the page of a class of one says nothing about this one.
"""

import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from labs.kit.learners.progress import FILES, FOLDER, Notebook, Tries, notebooks, read
from tools.imports import ROOT

OUT = ROOT / "build/class"
PAGES = ("index.html", "projected.html")
FEW = 3
BEGAN = datetime(2026, 11, 20)  # the course's first day
SLACK = timedelta(minutes=5)  # clocks that differ by less are taken for equal
USAGE = 'name the folders of your learners\' courses: make class FOLDERS="/home/*/training-labs"'


@dataclass
class Learner:
    """A learner, as far as progress has kept what happened.

    done: the time at which each exercise was passed; None for a time that cannot be read.
    tries: the content of tries.json.
    """

    name: str
    folder: Path
    done: dict[str, datetime | None]
    tries: Tries

    def stands_at(self, order: Sequence[str]) -> str | None:
        """Return the exercise at which the learner stands: "" behind the last one, None before the first try."""
        last = next(reversed(self.tries or self.done), None)
        if last is None or last not in self.done:
            return last
        return next((name for name in order[order.index(last) :] if name not in self.done), "")

    def mistake(self, exercise: str) -> str:
        """Return the name of the last mistake in an exercise, or ""."""
        return "" if exercise in self.done else self.tries.get(exercise, {}).get("mistake", "")

    def latest(self) -> datetime:
        times = [*self.done.values(), *(moment(tried["last"]) for tried in self.tries.values())]
        return max(filter(None, times), default=datetime.min)


def moment(text: str) -> datetime | None:
    """Return a time that progress has noted, or None if the text is none."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=None)
    except ValueError:
        return None


# ---- reading -----------------------------------------------------------------------------------------------


def read_class(folders: Sequence[Path], order: Collection[str], now: datetime) -> tuple[list[Learner], list[str]]:
    """Return the learners by name, and a sentence about each file or folder in which something is wrong.

    order: the exercises of the course.
    """
    folders = list({folder.resolve(): folder for folder in folders})
    names = [folder.name for folder in folders]
    if len(names) > 1 and len({*names}) == 1:
        names = [folder.parent.name for folder in folders]
    found: dict[str, Learner] = {}
    wrong = []
    for name, folder in zip(names, folders, strict=True):
        try:
            if not any((folder / each).exists() for each in (FOLDER, *(file for file, _ in FILES))):
                wrong.append(f"{folder} is no course: neither {FOLDER} nor a file of progress is in it.")
                continue
            learner, sentences = read_folder(name, folder, order, now)
        except OSError as error:
            wrong.append(f"{folder} is left out: {error}.")
            continue
        wrong += sentences
        if other := found.get(name):
            wrong.append(f"{folder} and {other.folder} are both called {name}: the one used last is shown.")
            learner = max(other, learner, key=Learner.latest)
        found[name] = learner
    return [found[name] for name in sorted(found)], wrong


def read_folder(name: str, folder: Path, order: Collection[str], now: datetime) -> tuple[Learner, list[str]]:
    """Return what progress has kept in a folder, as far as the course has these exercises, and sentences."""
    contents, wrong = [], []
    for file, valid in FILES:
        try:
            content = read(folder, file, valid)
        except ValueError:
            content = {}
            wrong.append(f"{folder / file} is broken, and counts as empty.")
        if strange := [exercise for exercise in content if exercise not in order]:
            listed = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
            why = "it was written by another version of the course, and CHANGELOG.md says what moved"
            wrong.append(f"{folder / file} has exercises that are not in this course, {listed}: {why}.")
        contents.append({exercise: value for exercise, value in content.items() if exercise in order})
    done, tries = contents
    done = {exercise: moment(time) for exercise, time in done.items()}
    for (file, _), times in zip(FILES, (done, {each: moment(tries[each]["last"]) for each in tries}), strict=True):
        if reasons := list(wrong_times(times, now)):
            wrong.append(f"{folder / file} has times that cannot be right, and they are shown: {'; '.join(reasons)}.")
    return Learner(name, folder, done, tries), wrong


def wrong_times(times: Mapping[str, datetime | None], now: datetime) -> Iterator[str]:
    """Yield what is wrong with the times of a file, which should not go back from line to line."""
    read = {exercise: time for exercise, time in times.items() if time}
    if len(read) < len(times):
        yield f"the time of {next(exercise for exercise in times if exercise not in read)} cannot be read"
    if late := next((exercise for exercise, time in read.items() if time > now + SLACK), None):
        yield f"{late}, {read[late]:%Y-%m-%d %H:%M}, is later than this machine's clock"
    if early := next((exercise for exercise, time in read.items() if time < BEGAN), None):
        yield f"{early}, {read[early]:%Y-%m-%d %H:%M}, is earlier than the course's first day"
    if back := next((pair for pair in pairwise(read) if read[pair[1]] < read[pair[0]]), None):
        yield f"{back[1]} was noted after {back[0]}, with an earlier time"


# ---- the pages ---------------------------------------------------------------------------------------------


def summary(learners: Sequence[Learner], course: Sequence[Notebook], questions: Mapping[str, str]) -> dict[str, Any]:
    """Return what the pages show."""
    titles = {name: each.title for each in course for name in each.exercises}
    order = list(titles)
    at = {learner.name: learner.stands_at(order) for learner in learners}
    standing = Counter(name for name in at.values() if name)
    most = max(standing, key=lambda name: (standing[name], -order.index(name)), default=None)
    mistakes = Counter((at[each.name], each.mistake(at[each.name])) for each in learners if at[each.name])
    ranked = sorted(mistakes.items(), key=lambda item: (-item[1], order.index(item[0][0])))
    rows = [
        {"exercise": exercise, "mistake": mistake, "count": count, "question": questions.get(mistake, "")}
        for (exercise, mistake), count in ranked
        if mistake
    ]
    tried = {name for each in learners for name in (*each.done, *each.tries)} | standing.keys()
    groups = [(each.title, [name for name in each.exercises if name in tried]) for each in course]
    passed = {name: sum(name in each.done for each in learners) for name in order}
    trying = {name: sum(name in each.tries.keys() - each.done.keys() for each in learners) for name in order}
    return {
        "learners": learners,
        "at": at,
        "groups": [(title, names) for title, names in groups if names],
        "untried": len(order) - len(tried),
        "exercises": len(order),
        "most": most and {"exercise": most, "title": titles[most], "count": standing[most]},
        "worst": next((row for row in rows if row["exercise"] == most and row["count"] > 1), None),
        "mistakes": rows,
        "passed": passed,
        "bars": bars(groups, passed, trying, len(learners)),
        "common": [row for row in rows if row["count"] >= FEW and len(learners) >= 2 * FEW],
        "few": FEW,
    }


def bars(
    groups: Sequence[tuple[str, list[str]]], passed: Mapping[str, int], trying: Mapping[str, int], of: int
) -> list[dict[str, Any]]:
    """Return the bars of the projected page, which no learner can be recognised by."""
    if of < 2 * FEW:
        return []
    return [
        {"title": title, "exercise": name, "passed": coarse(passed[name], of), "trying": coarse(trying[name], of)}
        for title, names in groups
        for name in names
        if max(passed[name], trying[name]) >= FEW
    ]


def coarse(count: int, of: int) -> tuple[int, str]:
    """Return a count of learners as a percentage and in words, both of which hide fewer than FEW."""
    if count < FEW:
        return 0, f"fewer than {FEW}"
    return (100, "nearly all") if count > of - FEW else (round(100 * count / of), f"{count} of {of}")


def write(shown: Mapping[str, Any], wrong: Sequence[str], out: Path) -> None:
    """Write both pages into a folder that nobody else may read."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("class_pages")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    out.mkdir(parents=True, exist_ok=True)
    out.chmod(0o700)
    for page in PAGES:
        (out / page).write_text(templates.get_template(page).render(shown, wrong=wrong), encoding="utf-8")


def hints() -> dict[str, str]:
    """Return the question that leads on from each mistake of the teachers' table."""
    from tools import teaching  # imports every exercise, and with them PyTorch

    return {row.name: row.question for row in teaching.rows()}


def main(arguments: Sequence[str], out: Path = OUT) -> int:
    """Write the pages of the folders named; return 1 if none of them is a course."""
    course = notebooks(ROOT)
    order = [name for each in course for name in each.exercises]
    learners, wrong = read_class([Path(each) for each in arguments], order, datetime.now())
    print(*wrong, sep="\n", end="\n" * bool(wrong), file=sys.stderr)
    if not learners:
        print(USAGE, file=sys.stderr)
        return 1
    write(summary(learners, course, hints()), wrong, out)
    print(f"with names, {len(learners)}: {out / PAGES[0]}\nto project, without: {out / PAGES[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
