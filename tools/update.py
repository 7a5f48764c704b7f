"""Bring the newest version of the course into this clone, and keep everything that its learner wrote: `make update`.

    git fetch && git show origin/HEAD:tools/update.py | python3 -     the same in a clone that is too old to have it

A file that only the learner changed stays as it is, and so do progress, tries and scores, which git ignores.  If the
course has changed the same file, the learner's is kept beside the new one, as 03_ddp.mine.ipynb.  In a notebook, the
learner's answers are also copied into the new one: each cell that the learner changed and the course did not.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main():
    os.chdir(git("rev-parse", "--show-toplevel").strip())
    git("fetch", "--quiet")
    new = git("rev-parse", "@{upstream}").strip()
    if git("rev-list", "--count", f"{new}..HEAD") != "0\n":
        sys.exit("This clone has commits of its own, so nothing was changed: `git merge @{upstream}` joins the two")
    mine = names("diff", "--name-only", "HEAD") | names("ls-files", "--others", "--exclude-standard")
    both = mine & names("diff", "--name-only", "--no-renames", "HEAD", new)
    kept = [set_aside(Path(name)) for name in sorted(both)]
    git("merge", "--quiet", "--ff-only", "--no-overwrite-ignore", new)
    for path, copy, before in kept:
        if copy.exists():
            state = (
                f"is new, with {carry(path, copy, before)} of your cells" if path.exists() else "has left the course"
            )
            print(f"{path} {state}; your file is {copy}")
    print("This is the newest version: CHANGELOG.md says what moved, and `make learn` opens it")


def git(*arguments):
    """Return what git prints.  If git refuses, exit with its words."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr.strip())
    return done.stdout


def names(*arguments):
    return set(git(*arguments, "-z").split("\0")) - {""}


def set_aside(path):
    """Move the learner's file to another name, and bring back the version on which it is based, if there is one.

    Returns the path, the other name and that version.
    """
    copy, number = path.with_suffix(f".mine{path.suffix}"), 2
    while copy.exists():
        copy, number = path.with_suffix(f".mine{number}{path.suffix}"), number + 1
    if path.exists():  # the learner has not deleted it
        shutil.move(path, copy)
    git("reset", "--quiet", "HEAD", "--", str(path))
    if not names("ls-files", str(path)):
        return path, copy, "{}"
    git("checkout", "--quiet", "--", str(path))
    return path, copy, git("show", f"HEAD:{path}")


def carry(path, copy, before):
    """Copy into the new notebook each cell that the learner changed and the course did not; return their number."""
    if path.suffix != ".ipynb":
        return 0
    notebook = json.loads(path.read_text("utf-8"))
    is_now, was = sources(notebook), sources(json.loads(before))
    try:
        mine = sources(json.loads(copy.read_text("utf-8")))
    except (ValueError, TypeError, AttributeError):  # the learner's file is no notebook, so the copy is all there is
        return 0
    answers = {key: mine[key] for key in was.keys() & mine if mine[key] != was[key] == is_now.get(key)}
    for cell in notebook["cells"]:
        cell["source"] = answers.get(cell.get("id"), cell["source"])
    if answers:
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return len(answers)


def sources(notebook):
    return {cell.get("id"): "".join(cell["source"]) for cell in notebook.get("cells", [])}


if __name__ == "__main__":
    main()
