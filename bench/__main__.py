"""The course against its peers: every figure comes from one run on one machine, as a ratio wherever possible.

    python -m bench              all figures, some minutes
    python -m bench --quick      fewer samples
    python -m bench step launch  these only

A performance ratio is the median over pairs of measurements, which are taken one right after the other.  The quartiles
stand beside it.  The first of these commands also saves all results to bench/results/<date>-<platform>.json, with
versions and the load of the machine.
"""

import argparse
import datetime
import importlib
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path

import torch

from bench.figure import Figure
from labs.kit import draw

BENCHMARKS = (
    "launch",
    "step",
    "zero",
    "tensor",
    "pipeline",
    "plan",
    "explorer",
    "site",
    "published",
    "checkpoint",
    "native_checkpoint",
    "flight_recorder",
    "record",
    "failure",
)
RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    options.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)} (all)")
    options.add_argument("--quick", action="store_true", help="fewer samples")
    chosen = options.parse_args()
    if unknown := set(chosen.names) - set(BENCHMARKS):
        options.error(f"no benchmark {', '.join(sorted(unknown))}: there are {', '.join(BENCHMARKS)}")
    os.environ.setdefault("LABS_DEVICE", "cpu")  # every machine measures the same, unless `make gpu` says otherwise
    before, figures = os.getloadavg()[0], []
    for name in chosen.names or BENCHMARKS:
        print(f"{name} ...", flush=True)
        figures += importlib.import_module(f"bench.{name}").figures(chosen.quick)
    print(f"\n{show(figures)}\n")
    if not chosen.names and not chosen.quick:
        print(f"Saved: {save(figures, before)}")


def save(figures: list[Figure], load_before: float) -> str:
    """Write today's results on this platform, and return the file's path."""
    today = datetime.date.today().isoformat()
    content = {
        "schema": 1,
        "date": today,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "platform": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load": {"before": load_before, "after": os.getloadavg()[0]},
        "figures": [asdict(each) | {"met": each.met} for each in figures],
    }
    path = RESULTS / f"{today}-{platform.system()}-{platform.machine()}.json".lower()
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return os.path.relpath(path)


def show(figures: list[Figure]) -> draw.Table:
    rows = [
        {
            "": each.name,
            "median": f"{each.value:.3g} {each.unit}",
            "quartiles": f"{each.low:.3g} to {each.high:.3g}",
            "of": each.count,
            "target": each.target or "none",
            "met": {True: "yes", False: "NO", None: ""}[each.met],
        }
        for each in figures
    ]
    notes = tuple(f"{each.name}: {each.note}" for each in figures if each.note)
    table = draw.table(rows)
    return draw.Table(table.header, table.rows, table.numeric, table.caption, notes)


if __name__ == "__main__":
    main()
