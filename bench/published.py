"""The plan against published runs.

python -m bench.published FILE.csv     how near tokens per second and bytes are, and how well layouts are ordered
python -m bench published              the relative error of the seconds of a step, for each table of labs/plan
"""

import sys
from pathlib import Path

from bench.figure import Figure, figure
from labs import plan

TABLES = Path(plan.__file__).parent / "tables"


def figures(quick: bool) -> list[Figure]:
    """Return the errors for each table; they are exact, and `quick` leaves none out."""
    reports = {path.stem: plan.check(path) for path in sorted(TABLES.glob("*.csv"))}
    return [
        figure(f"plan, {name}: error of a step's seconds", report.time_errors, unit="")
        for name, report in reports.items()
        if len(report.time_errors) > 1
    ]


def main(paths: list[str]) -> int:
    if not paths:
        print("give the table of runs: python -m bench.published FILE.csv", file=sys.stderr)
        return 2
    try:
        print(*map(plan.check, paths), sep="\n\n")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
