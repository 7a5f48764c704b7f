"""The tests of the files that changed: `make quick`, while one works on them.

    python -m tools.quick              since the last commit
    python -m tools.quick main         since that one

The tests of a file are those of its folder: tests/fsdp for labs/fsdp/order.py.  A file at the top, or in the kit (which
is no chapter), has the tests named after it: tests/test_clip.py, tests/kit/test_draw.py.  A strategy also has its odd
trainings.  `make test` covers what is built on the file.
"""

import subprocess
import sys
from pathlib import Path

from tools.imports import LABS, ROOT

TESTS = ROOT / "tests"
ROWS = {"ddp": "ddp", "zero": "zero", "fsdp": "fsdp or hsdp", "tp": "tp", "pp": "pp-"}  # the odd trainings of a chapter

TOP = Path(), Path("kit")


def changed(since: str) -> set[Path]:
    """Return the files that differ from that commit.

    Raises SystemExit, with another way, where git knows no such commit.
    """
    asked = subprocess.run(["git", "rev-parse", "--verify", since], cwd=ROOT, capture_output=True, text=True)
    if asked.returncode:
        reason = asked.stderr.strip().removeprefix("fatal: ")
        raise SystemExit(f"make quick asks git what has changed since {since}: {reason}. `make test` needs no git")
    commands = ["git diff --name-only --diff-filter=d " + since, "git ls-files --others --exclude-standard"]
    return {
        ROOT / name
        for command in commands
        for name in subprocess.check_output(command.split(), cwd=ROOT, text=True).splitlines()
    }


def tests_of(path: Path) -> list[Path]:
    """Return the tests of a file of labs: a folder, a file, or nothing if only larger tests use it."""
    inside = path.relative_to(LABS)
    places = [TESTS / inside.with_name(f"test_{path.name}")]
    if inside.parent not in TOP:
        folders = [folder for folder in inside.parents if folder not in TOP]  # the innermost first
        places = [
            place
            for folder in folders
            for place in (TESTS / folder, TESTS / folder.with_name(f"test_{folder.name}.py"))
        ]
    return [place for place in places if place.exists()][:1]


def chosen_for(paths: set[Path]) -> list[Path]:
    of_labs = {path for path in paths if path.is_relative_to(LABS) and path.suffix == ".py"}
    own = {path for path in paths if path.is_relative_to(TESTS) and path.match("test_*.py")}
    return sorted(own.union(*map(tests_of, of_labs)))


def main(since: str = "HEAD") -> int:
    paths = changed(since)
    rows = {
        word for path in paths if path.is_relative_to(LABS) for word in path.relative_to(LABS).with_suffix("").parts
    }
    runs = [[*map(str, chosen_for(paths)), str(TESTS / "test_layers.py")]]
    if odd := " or ".join(ROWS[row] for row in sorted(rows & ROWS.keys())):
        runs.append([str(TESTS / "test_odd.py"), "-k", odd])
    return max(subprocess.call([sys.executable, "-m", "pytest", "-q", "-n", "auto", *run], cwd=ROOT) for run in runs)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
