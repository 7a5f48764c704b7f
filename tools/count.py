"""The lines of the project, by group: `make count`.

Counted are the lines of all files of text that git knows, of notebooks their sources alone.
"""

import subprocess
from collections import Counter
from pathlib import PurePath

from labs.kit import draw
from tools.imports import ROOT
from tools.quick import is_textbook

TEXT = {".py", ".md", ".toml", ".yml", ".txt", ".sh", ".svg", ".csv", ".json", ".cfg", ""}
GROUPS = {  # a path that begins so belongs to the first of these
    "the textbook": "",  # see `group`
    "exercises, challenges, their engine and answers": ("labs/exercises", "tests/exercises", "tests/answers"),
    "the rest of the kit": ("labs/kit",),
    "native, deepspeed and xla": ("labs/native", "labs/deepspeed", "labs/xla"),
    "the sources of the notebooks": ("solutions",),
    "other tests": ("tests",),
    "tools and benchmarks": ("tools", "bench"),
    "all else": ("",),
}


def group(path: str) -> str:
    parts = PurePath(path).with_suffix("").parts
    if parts[0] == "labs" and len(parts) > 1 and path.endswith(".py") and is_textbook(parts[1]):
        return "the textbook"
    return next(name for name, prefixes in GROUPS.items() if prefixes and path.startswith(prefixes))


def main() -> None:
    lines: Counter[str] = Counter()
    for path in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines():
        if PurePath(path).suffix in TEXT:
            text = (ROOT / path).read_text(encoding="utf-8")
            lines[group(path)] += text.count("\n")
            if path.startswith("labs/cost/"):
                lines["... of it cost"] += text.count("\n")
            if path.startswith("labs/plan/") and path.endswith(".py"):
                lines["... of it plan, without its tables"] += text.count("\n")
    of_textbook = [name for name in lines if name.startswith("...")]
    order = ["the textbook", *sorted(of_textbook), *(name for name in GROUPS if name != "the textbook")]
    total = sum(lines[name] for name in GROUPS)
    print(
        draw.table([{"": name, "lines": f"{lines[name]:,}"} for name in order] + [{"": "all", "lines": f"{total:,}"}])
    )


if __name__ == "__main__":
    main()
