"""The tests of what was changed: `make quick`, while one works on it.

    python -m tools.quick              since the last commit
    python -m tools.quick main         since that one

A file's tests are those named after it or its chapter, and those that import it from inside of its chapter; a
strategy's odd trainings, too.  What is built on it is left to `make test`.
"""

import subprocess
import sys
from pathlib import Path

from tools.imports import LABS, ROOT, imports, name_of, own

TESTS = ROOT / "tests"
ROWS = {"ddp": "ddp", "zero": "zero", "fsdp": "fsdp or hsdp", "tp": "tp", "pp": "pp-"}  # of the odd trainings


def changed(since: str) -> set[Path]:
    commands = ["git diff --name-only --diff-filter=d " + since, "git ls-files --others --exclude-standard"]
    return {
        ROOT / name
        for command in commands
        for name in subprocess.check_output(command.split(), cwd=ROOT, text=True).splitlines()
    }


def chosen_for(paths: set[Path]) -> list[Path]:
    names = {name_of(path) for path in paths if path.is_relative_to(LABS) and path.suffix == ".py"}
    words = {word for name in names for word in name.split(".") if word != "kit"}
    every = set(TESTS.glob("test_*.py"))
    named = {test for test in every if any(f"{test.stem}_".startswith(f"test_{word}_") for word in words)}
    inside = {name for name in names if "." in name}
    return sorted(named | {test for test in every if own(imports(test)) & inside} | paths & every)


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
