"""The tests of a change: `make quick`, while one works on it.

    python -m tools.quick              since the last commit
    python -m tools.quick main         since that one

A change reaches what is built on it: a file of the textbook reaches all that import it within the textbook, and every
test file that imports one of these runs, with the odd trainings and the rows of the contract of each strategy reached.
A file of the kit has the tests of its folder, an exercise all answers to it, those of the archive included, the engine
of the exercises all answers but these, and a notebook's source both of its notebooks.  All configurations run, where
`make test` runs one.
"""

import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tools.imports import FILES, LABS, ROOT, imports, name_of, own

TESTS = ROOT / "tests"
ANSWERS = TESTS / "exercises/engine/test_answers.py"
ENGINE = LABS / "exercises/engine"
TABLES = [TESTS / "test_contract.py", TESTS / "test_odd.py"]
ROWS = {
    "ddp": "ddp",
    "zero": "zero",
    "fsdp": "fsdp or hsdp",
    "tp": "tp",
    "cp": "cp",
    "pp": "pp-",
}  # a chapter's rows in the tables
NOT_TEXTBOOK = {"kit", "exercises", "native", "deepspeed", "xla", "__main__"}
NBVAL = ["--nbval", "--nbval-sanitize-with", "tools/nbval.cfg", "--nbval-cell-timeout", "300"]


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


# ---- what is reached -------------------------------------------------------------------------------------


@cache
def importers() -> dict[str, set[str]]:
    """Return, for each file of the textbook by its name, the files of the textbook that import it."""
    found: dict[str, set[str]] = {}
    for path in FILES:
        if is_textbook(name_of(path)):
            for module in own(imports(path)):
                found.setdefault(module, set()).add(name_of(path))
    return found


def is_textbook(name: str) -> bool:
    return name.split(".")[0] not in NOT_TEXTBOOK


def reached(names: Iterable[str]) -> set[str]:
    """Return the files of the textbook that import one of these, directly or through others; and these."""
    found, new = set(), set(names)
    while new:
        found |= new
        new = set().union(*(importers().get(name, set()) for name in new)) - found
    return found


@cache
def imported_by_tests() -> dict[Path, set[str]]:
    return {path: own(imports(path)) for path in TESTS.rglob("test_*.py")}


def tests_of_textbook(names: Iterable[str]) -> set[Path]:
    """Return the tests that import a file that is reached from these, or stand in the folder of one."""
    files = reached(names)
    folders = {file.split(".")[0] for file in files}
    return {
        path
        for path, modules in imported_by_tests().items()
        if path not in TABLES and (modules & files or path.relative_to(TESTS).parts[0] in folders)
    }


def tests_of_kit(path: Path) -> set[Path]:
    """Return the tests of a file's folder in the kit, or the file of tests that is named after it."""
    inside = path.relative_to(LABS)
    folder, file = TESTS / inside.parent, TESTS / inside.with_name(f"test_{path.name}")
    beside = set(folder.glob("test_*.py")) if inside.parent != Path("kit") else set()
    return {file} if file.exists() else beside


# ---- the runs --------------------------------------------------------------------------------------------


def runs_for(paths: set[Path]) -> list[list[str]]:
    """Return the arguments of pytest for each run that these changed files ask for."""
    ours = {path for path in paths if path.is_relative_to(LABS) and path.suffix == ".py"}
    textbook = {name_of(path) for path in ours if is_textbook(name_of(path))}
    kit = {path for path in ours if path.is_relative_to(LABS / "kit")}
    chosen = {path for path in paths if path.is_relative_to(TESTS) and path.match("test_*.py")}
    if any(path.is_relative_to(ENGINE) for path in ours):
        chosen |= set(ANSWERS.parent.glob("test_*.py"))
    chosen |= tests_of_textbook(textbook).union(*map(tests_of_kit, kit)) if textbook or kit else set()
    runs = [[*sorted(map(str, chosen)), str(TESTS / "test_layers.py")]]
    chapters = {name.split(".")[0] for name in reached(textbook)}
    if rows := " or ".join(ROWS[chapter] for chapter in sorted(chapters & ROWS.keys())):
        runs.append([*map(str, TABLES), "-k", rows])
    if exercises := sorted({path.stem for path in paths if is_exercise(path)}):
        runs.append([str(ANSWERS), "-m", "depth or soak", "-k", " or ".join(f"[{name}]" for name in exercises)])
    if notebooks := sorted(path.stem for path in paths if path.parent == ROOT / "solutions" and path.suffix == ".py"):
        runs.append(
            [*NBVAL, *(f"{folder}/{name}.ipynb" for name in notebooks for folder in ("solutions", "notebooks"))]
        )
    return runs


def is_exercise(path: Path) -> bool:
    folders = LABS / "exercises", TESTS / "exercises"
    return path.parent.parent in folders and path.parent.name != "engine" and not path.name.startswith("_")


def main(since: str = "HEAD") -> int:
    command = [sys.executable, "-m", "pytest", "-p", "tools.lean", "-q", "-n", "auto", "-m", "not soak"]
    return max(subprocess.call([*command, *run], cwd=ROOT) for run in runs_for(changed(since)))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
