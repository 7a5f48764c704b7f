"""The two commands of the marking, in the root of the repository: hand out notebooks, and mark what was handed in.

python -m tools.marking release 03
python -m tools.marking mark submitted [--without-sandbox]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nbformat

from tools.marking import sandbox
from tools.marking.handing import NotMarked, Submission, handed_out, read, submissions

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("nbgrader_config.py")


def nbgrader(course: Path, *arguments: str) -> None:
    """Run a command of nbgrader.  Raises NotMarked with its last lines if it fails."""
    folder = os.environ.get("NBGRADER", str(ROOT / "build/marking-env/bin"))  # nbgrader calls alembic by its name
    command = [f"{folder}/nbgrader", *arguments, "--Execute.enabled=False"]  # whatever the settings are
    shutil.copy(CONFIG, course)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=course, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise NotMarked(f"nbgrader {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def release(number: str, course: Path, notebooks: Path = ROOT / "notebooks") -> Path:
    """Hand out the notebook with this number, and return its file.  Raises NotMarked if there is none."""
    found = sorted(notebooks.glob(f"{number}_*.ipynb"))
    if not found:
        raise NotMarked(f"there is no notebook {number} in {notebooks}")
    name = found[0].stem
    write(course / "source" / name / f"{name}.ipynb", nbformat.writes(handed_out(found[0])))
    nbgrader(course, "generate_assignment", name, "--create", "--force")
    return course / "release" / name / f"{name}.ipynb"


def mark(folder: Path, course: Path, isolated: bool) -> None:
    """Mark all submissions in `folder`: print a line for each, and write points and feedback into `course`."""
    released = {path.stem: read(path) for path in sorted(course.glob("release/*/*.ipynb"))}
    if not released:
        raise NotMarked(f"{course} has no released notebook: `make release N=03` hands one out")
    found, sentences = submissions(folder, released)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for line in pool.map(lambda pair: judged(*pair, course, isolated), enumerate(found)):
            print(line, flush=True)
    for name in sorted({each.path.stem for each in found}):
        nbgrader(course, "autograde", name, "--force", "--create")
        nbgrader(course, "generate_feedback", name, "--force")
    nbgrader(course, "export")
    for sentence in [*sentences, *(remark for each in found for remark in each.remarks)]:
        print(sentence)


def judged(slot: int, submission: Submission, course: Path, isolated: bool) -> str:
    """Judge a submission, write its verdicts for nbgrader, and return a line with its points."""
    began, name = time.monotonic(), submission.path.stem
    verdicts = submission.with_points(sandbox.verdicts(submission.requests(), slot, isolated))
    write(course / "submitted" / submission.learner / name / f"{name}.ipynb", nbformat.writes(submission.merged()))
    write(course / "verdicts" / submission.learner / f"{name}.json", json.dumps(verdicts, indent=1))
    for each, verdict in verdicts.items():
        if "not done in time" in verdict["lines"][0]:  # nobody's mistake, if the machine was busy
            submission.remarks.append(f"{submission.path}: check.{each} was not done in time; mark it again")
    points = ", ".join(f"{each} {verdict['points']}" for each, verdict in verdicts.items())
    return f"{submission.learner} {name}: {points} ({time.monotonic() - began:.0f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--course", type=Path, default=ROOT / "marking", help="the folder of nbgrader's course")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("release").add_argument("number", help="a notebook's number, like 03")
    marking = commands.add_parser("mark")
    marking.add_argument("folder", type=Path, help="a folder with one folder for each learner")
    marking.add_argument("--without-sandbox", action="store_true", help="mark although nothing is isolated")
    chosen = parser.parse_args()
    try:
        if chosen.command == "release":
            print(f"hand out {release(chosen.number, chosen.course)}: it goes into a learner's notebooks/")
            return 0
        reason = sandbox.missing()
        if reason and not chosen.without_sandbox:
            raise NotMarked(
                f"{reason}: submissions would run with your files, your network and your rights, solutions/ and other "
                f"submissions among them, with limits of memory for one process only. If you trust them, add UNSAFE=1"
            )
        mark(chosen.folder, chosen.course, isolated=not reason)
        print(f"points are in {chosen.course}/grades.csv, the checks' words in {chosen.course}/feedback")
        return 0
    except (NotMarked, RuntimeError) as sentence:
        print(sentence, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
