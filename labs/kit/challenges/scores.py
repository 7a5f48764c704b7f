"""A learner's tries: scores.json in the folder of the course, beside progress.json.

noted("slow_wire", 61.2)           the scores of all tries and of this one, which is saved if a learner's notebook runs
main([])                           each challenge: its task, your best, the course's own score, the best known
main(["../anna", "../ben"])        the best scores of each learner; with --no-names, without the learners' names

scores.json    {"slow_wire": [44.1, 61.2], …}
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from labs.kit import progress
from labs.kit.drawing.tables import Table, table

FILE = "scores.json"
Scores = dict[str, list[float]]


def noted(challenge: str, score: float) -> list[float]:
    """Save a score if a learner's notebook runs; return the scores of all tries of this challenge."""
    try:
        course = progress.learners_course()
        if course is None:
            return [score]
        with progress.alone_in(course):
            try:
                found = read(course)
            except ValueError:
                found = {}  # a broken file is replaced
            tries = [*found.get(challenge, []), round(score, 1)]
            progress.write(course, found | {challenge: tries}, FILE)
        return tries
    except OSError:
        return [score]  # the folder cannot be written to


def read(course: Path) -> Scores:
    """Return the scores in a course's folder.  Raises ValueError if `noted` has not written the file."""
    return progress.read(course, FILE, lambda tries: isinstance(tries, list) and all(map(is_score, tries)))


def is_score(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def best(scores: Scores, challenge: str) -> str:
    return f"{max(scores[challenge]):.1f}" if scores.get(challenge) else "–"


def report(scores: Scores) -> str:
    from labs.kit.beat import ALL

    paragraphs = []
    for each in ALL:
        tries = len(scores.get(each.name, []))
        yours = f"your best: {best(scores, each.name)} ({tries} {'try' if tries == 1 else 'tries'})"
        task = textwrap.indent(textwrap.fill(each.task, 92), "    ")
        paragraphs.append(f"{each.notebook} {each.name}: {each.title}\n{task}\n    {yours}; {each}")
    return "\n\n".join(paragraphs)


def tried(course: Path) -> str:
    """Return a line for each challenge that was tried, for `make progress`."""
    from labs.kit.beat import ALL

    scores = read(course)
    return "\n".join(
        f"{each.notebook} {each.name}: {best(scores, each.name)}; {each}" for each in ALL if each.name in scores
    )


def classroom(learners: Sequence[Path], names: bool) -> Table:
    """Return a table of each learner's best scores.

    names: whether to show whose they are; if not, the rows are sorted by score, so that their order tells nothing.
    """
    from labs.kit.beat import ALL

    if missing := [folder for folder in learners if not folder.is_dir()]:
        raise ValueError(f"there is no folder {missing[0]}")
    found = {str(folder): read(folder) for folder in learners}
    if not names:
        ordered = sorted(found.values(), key=lambda scores: -sum(max(tries) for tries in scores.values() if tries))
        found = {f"learner {number}": scores for number, scores in enumerate(ordered, 1)}
    rows = [{"best": name, **{each.name: best(scores, each.name) for each in ALL}} for name, scores in found.items()]
    return table(rows)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m labs challenges", description="What is open, and your best.")
    parser.add_argument("learners", metavar="FOLDER", nargs="*", type=Path, help="the course of a learner")
    parser.add_argument("--no-names", action="store_true", help="do not say whose scores they are")
    chosen = parser.parse_args(arguments)
    try:
        course = progress.course_here()
        print(classroom(chosen.learners, not chosen.no_names) if chosen.learners else report(read(course)))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
