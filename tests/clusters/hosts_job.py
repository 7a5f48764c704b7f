"""The program of each rank of test_two_hosts.py: with FOLDER STRATEGY ..., it trains by each strategy in turn.

The report of a step also says what had crossed the link by then, so that a steady step is the difference of two.
"""

import sys
from dataclasses import replace
from pathlib import Path

from labs.clusters import report
from labs.clusters.settings import Checkpoints, Settings
from labs.clusters.trainer import train
from labs.kit.launch import run
from tests.clusters.two_hosts import crossed

SHORT = Settings(model="small", context=64, batch=8, steps=5, sample=0)


class Counted(report.Report):
    def step(self, number: int, **values: float) -> None:
        super().step(number, **values, **crossed())


def main(folder: str, *strategies: str) -> None:
    report.Report = Counted
    for name in strategies:
        own = Path(folder, name)
        run(train, replace(SHORT, strategy=name, report=own, checkpoints=Checkpoints(own / "saved")))


if __name__ == "__main__":
    main(*sys.argv[1:])
