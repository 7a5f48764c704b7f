"""The command `python -m labs progress`: the exercises that were passed, and each challenge tried."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from labs.exercises.engine.scores import read
from labs.kit import beat
from labs.kit.commands.challenges import best
from labs.kit.learners import progress


@dataclass
class Progress:
    """List the exercises of each notebook: when each was passed, and the tries; count those of several learners."""

    # folder of each learner's course; the course here, if none is given
    learners: Annotated[Positional[tuple[Path, ...]], arg(metavar="[FOLDER ...]")] = ()


def main(arguments: Sequence[str]) -> int:
    """Print the exercises of the course in or around the working directory, or a table of several learners.

    Returns the exit status.
    """
    chosen = tyro.cli(Progress, prog="python -m labs progress", args=arguments)
    try:
        course = progress.course_here()
        print(progress.classroom(course, chosen.learners) if chosen.learners else progress.report(course))
        if not chosen.learners and (lines := tried(course)):
            print(f"\n{lines}")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def tried(course: Path) -> str:
    """Return a line for each challenge that the learner has tried."""
    scores = read(course)
    return "\n".join(
        f"{each.notebook} {each.name}: {best(scores, each.name)}; {each}" for each in beat.ALL if each.name in scores
    )
