"""The command `python -m labs challenges`: each challenge, and the best scores of one learner or several."""

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import FlagCreatePairsOff, Positional, arg

from labs.exercises.engine.scores import Scores, read
from labs.kit import beat
from labs.kit.drawing.tables import Table, table
from labs.kit.learners import progress


@dataclass
class Challenges:
    """List each challenge with its task, your best score and the bound, or the best scores of several learners."""

    # folder of each learner's course; the course here, if none is given
    learners: Annotated[Positional[tuple[Path, ...]], arg(metavar="[FOLDER ...]")] = ()
    no_names: FlagCreatePairsOff[bool] = False  # do not say whose scores they are


def main(arguments: Sequence[str]) -> int:
    """Print the challenges with this learner's best scores, or a table of several learners; return the exit status."""
    chosen = tyro.cli(Challenges, prog="python -m labs challenges", args=arguments)
    try:
        course = progress.course_here()
        print(classroom(chosen.learners, not chosen.no_names) if chosen.learners else report(read(course)))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


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
