"""The command `python -m labs plan`: a plan for a model on a cluster.

python -m labs plan llama3-70b --gpus 32 --batch 512
python -m labs plan llama3-8b --gpus 8 --software compiled --layout shards=8,batch=2
python -m labs plan llama3-8b --gpus 12 --node 4 --card "RTX 4090" --context 32k
python -m labs plan --config model/config.json --gpus 8
"""

import argparse
import re
import sys
from dataclasses import replace
from pathlib import Path

from labs.llama import read_config
from labs.model import PRESETS, Config
from labs.plan.choice import priced, search
from labs.plan.constants import FITTED
from labs.plan.layout import Layout
from labs.plan.machines import CLUSTERS, Cluster
from labs.plan.reasons import evidence, explain, mesh, spent
from labs.plan.results import HEAD, Found, gb, row, table

KIND = "H100, InfiniBand"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m labs plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", nargs="?", choices=PRESETS, help="one of the course's shapes")
    add("--config", metavar="config.json", help="a Llama's shape, as Hugging Face keeps it, in place of a model")
    add("--gpus", type=int, default=32, help="how many (%(default)s)")
    add("--cluster", choices=CLUSTERS, metavar="KIND", help=f"{' | '.join(CLUSTERS)} ({KIND})")
    add("--node", type=int, help="GPUs of a node (the cluster's)")
    add(
        "--card", help="the card: one of those above by name, like 'RTX 4090', or its memory, like 24GB (the cluster's)"
    )
    add("--software", default="pytorch", choices=FITTED, help="training software: selects constants (%(default)s)")
    add("--batch", type=int, default=512, help="sequences of a step, on all GPUs together (%(default)s)")
    add("--context", type=tokens, help="tokens of a sequence, like 4096 or 32k (the model's)")
    add("--layout", type=fields, help=f"price one layout, like shards=8,tp=8: {', '.join(Layout._fields)}")
    add("--list", type=int, default=10, metavar="N", help="how many layouts to list (%(default)s)")
    return parser


# ---- reading arguments -----------------------------------------------------------------------------------


def tokens(text: str) -> int:
    """Return a number of tokens; 32k is 32,768."""
    if not re.fullmatch(r"[1-9]\d*k?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of tokens: write it like 4096 or 32k")
    return int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)


def fields(text: str) -> dict:
    """Return the fields of a Layout that are written as shards=8,recompute=full, in their types."""
    found = {}
    for word in text.split(","):
        name, _, value = word.strip().partition("=")
        usual = Layout._field_defaults.get(name)
        if isinstance(usual, str):
            found[name] = value
        elif isinstance(usual, bool) and value in ("true", "false"):
            found[name] = value == "true"
        elif usual is not None and not isinstance(usual, bool) and value.isdecimal():
            found[name] = int(value)
        else:
            known = ", ".join(f"{name}={usual}".lower() for name, usual in Layout._field_defaults.items())
            raise argparse.ArgumentTypeError(f"{word!r} is no field of a layout: write some of {known}")
    return found


def cluster_of(kind: str | None, card: str | None, node: int | None, gpus: int) -> Cluster:
    """Return the cluster of a kind, with another card or size of node; a card without a kind selects its own kind."""
    base = CLUSTERS[kind or KIND]
    if card and (size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB?", card, re.IGNORECASE)):
        base = replace(base, card=float(size[1]) * 1e9)
    elif card:
        like = next((each for each in CLUSTERS.values() if each.name.lower().startswith(card.lower())), None)
        if like is None:
            raise ValueError(f"card {card!r} is not known: give its memory, like 24GB, or one of {', '.join(CLUSTERS)}")
        its = {"card": like.card, "memory": like.memory, "flops": like.flops, "power": like.power}
        base = replace(base, name=f"{like.name} in {base.name}", **its) if kind else like
    return replace(base, node=node or base.node, gpus=gpus)


def config_of(model: str | None, path: str | None, context: int | None) -> Config:
    """Return the model's shape; its positions are rotary, so any context is possible."""
    if path and Path(path).name != "config.json":
        raise ValueError(f"config {path!r}: give a file of the name config.json, as Hugging Face keeps it")
    config = read_config(Path(path).parent) if path else PRESETS[model]
    return replace(config, context=max(context or 0, config.context))


# ---- the command -----------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    chosen = parser().parse_args(arguments)
    if sum(each is not None for each in (chosen.model, chosen.config)) != 1:
        parser().error("give a model or --config config.json: one of them")
    try:
        cluster = cluster_of(chosen.cluster, chosen.card, chosen.node, chosen.gpus)
        config = config_of(chosen.model, chosen.config, chosen.context)
        found = search(config, cluster, chosen.batch, chosen.context, chosen.software)
        lines = [one(found, chosen.layout)] if chosen.layout else all_of(found, chosen.list)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(*lines, sep="\n")
    return 0 if found.best else 1


def all_of(found: Found, rows: int) -> list[str]:
    if not found.best:
        return [table(found)]
    best = [*explain(found), "", repr(mesh(found.best.layout))]
    return [table(found, rows), "", evidence(found.setup), "", *best]


def one(found: Found, fields: dict) -> str:
    """Return the predicted time and bytes of a layout in words, and its place among those that fit."""
    each, card = priced(found, **fields), found.setup.cluster.card
    lines = [HEAD, row(each), "", f"It takes {spent(each)}."]
    if each.peak > card:
        return "\n".join([*lines, f"It does not fit: its fullest rank holds {gb(each.peak)}, the card {gb(card)}."])
    place = sum(other.seconds < each.seconds for other in found.feasible) + 1
    if found.feasible:
        times = each.seconds / found.feasible[0].seconds
        lines += [f"It is number {place:,} of {len(found.feasible):,} that fit, {times:.2f} × as long as the quickest."]
    return "\n".join([*lines, "", evidence(found.setup)])
