"""The commands: `python -m labs plan` for a model on a cluster, and `--check FILE.csv` against published runs.

python -m labs plan llama3-70b --gpus 32 --batch 512
python -m labs plan llama3-70b --gpus 32 --batch 512 --context 4096 --cluster "A100, 80 GB"
python -m labs plan --check runs.csv
"""

import argparse
import sys

from labs.model import PRESETS
from labs.plan.choice import search
from labs.plan.compare import check
from labs.plan.machines import CLUSTERS
from labs.plan.reasons import explain, mesh


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labs plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", choices=PRESETS, help="one of the course's shapes")
    parser.add_argument("--gpus", type=int, default=32)
    parser.add_argument(
        "--cluster", default="H100, InfiniBand", choices=CLUSTERS, metavar="KIND", help=" | ".join(CLUSTERS)
    )
    parser.add_argument("--batch", type=int, default=512, help="sequences of a step, on all GPUs together")
    parser.add_argument("--context", type=int, help="tokens of a sequence (the model's, if not given)")
    parser.add_argument("--check", metavar="FILE.csv", help="a table of published runs")
    return parser


def main(arguments: list[str]) -> int:
    chosen = parser().parse_args(arguments)
    if (chosen.model is None) == (chosen.check is None):
        parser().error("give a model or --check FILE.csv: one of them")
    try:
        if chosen.check:
            print(check(chosen.check))
            return 0
        cluster = CLUSTERS[chosen.cluster].of(chosen.gpus)
        found = search(PRESETS[chosen.model], cluster, chosen.batch, chosen.context)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(found)
    if found.best:
        print("", *explain(found), "", repr(mesh(found.best.layout)), sep="\n")
    return 0 if found.best else 1
