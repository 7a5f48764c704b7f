"""The commands `python -m labs progress` and `python -m labs challenges`: learners' passed exercises and scores.

progress_main([])                   the exercises of each notebook, and the best score of each challenge tried
progress_main(["../anna"])          the number of exercises that each learner has passed
challenges_main([])                 each challenge: its task, your best score, the course's score, the best possible
challenges_main(["../anna", …])     the best scores of each learner; with --no-names, without the learners' names
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from labs.exercises.engine.scores import Scores, read
from labs.kit import beat
from labs.kit.drawing.tables import Table, table
from labs.kit.learners import progress


def best(scores: Scores, challenge: str) -> str:
    return f"{max(scores[challenge]):.1f}" if scores.get(challenge) else "–"


def report(scores: Scores) -> str:
    paragraphs = []
    for each in beat.ALL:
        tries = len(scores.get(each.name, []))
        yours = f"your best: {best(scores, each.name)} ({tries} {'try' if tries == 1 else 'tries'})"
        task = textwrap.indent(textwrap.fill(each.task, 92), "    ")
        paragraphs.append(f"{each.notebook} {each.name}: {each.title}\n{task}\n    {yours}; {each}")
    return "\n\n".join(paragraphs)


def tried(course: Path) -> str:
    """Return a line for each challenge that the learner has tried, for `make progress`."""
    scores = read(course)
    return "\n".join(
        f"{each.notebook} {each.name}: {best(scores, each.name)}; {each}" for each in beat.ALL if each.name in scores
    )


def classroom(learners: Sequence[Path], names: bool) -> Table:
    """Return a table of each learner's best scores in the challenges.

    names: whether to show the learners' names; if not, the rows are sorted by score, so that their order hides the
        names.
    """
    if missing := [folder for folder in learners if not folder.is_dir()]:
        raise ValueError(f"there is no folder {missing[0]}: name the folder of each learner's course")
    found = {str(folder): read(folder) for folder in learners}
    if not names:
        ordered = sorted(found.values(), key=lambda scores: -sum(max(tries) for tries in scores.values() if tries))
        found = {f"learner {number}": scores for number, scores in enumerate(ordered, 1)}
    rows = [
        {"best": name, **{each.name: best(scores, each.name) for each in beat.ALL}} for name, scores in found.items()
    ]
    return table(rows)


def challenges_main(arguments: Sequence[str]) -> int:
    """Print the challenges with this learner's best scores, or a table of several learners' best scores.

    Returns the exit status.
    """
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


def progress_main(learners: Sequence[str]) -> int:
    """Print the exercises of the course with the time at which each was passed, or a table of several learners.

    learners: the folder of each learner's course; if empty, the course in or around the working directory counts.
    Returns the exit status.
    """
    try:
        course = progress.course_here()
        print(progress.classroom(course, [Path(each) for each in learners]) if learners else progress.report(course))
        if not learners and (lines := tried(course)):
            print(f"\n{lines}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
