"""The plan against published runs.

python -m bench.published FILE.csv     how near tokens per second and bytes are, and how well layouts are ordered
python -m bench published              the relative error of the seconds of a step, for each table of the course

A file has the columns of labs/plan/published.csv, which labs/plan/published.md explains.
"""

import sys
from pathlib import Path

from bench.figure import Figure, figure
from labs.plan import Report, check
from labs.plan.published import RUNS, rows_of


def reports(path: str | Path) -> list[Report]:
    """Return a report on each table of a file."""
    return [check(table, path) for table in dict.fromkeys(row["table"] for row in rows_of(path))]


def figures(quick: bool) -> list[Figure]:
    """Return the errors for each table; they are exact, and `quick` leaves none out."""
    return [
        figure(f"plan, {report.table}: error of a step's seconds", report.time_errors, unit="")
        for report in reports(RUNS)
        if len(report.time_errors) > 1
    ]


def main(paths: list[str]) -> int:
    if not paths:
        print("give the table of runs: python -m bench.published FILE.csv", file=sys.stderr)
        return 2
    try:
        print(*(report for path in paths for report in reports(path)), sep="\n\n")
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
