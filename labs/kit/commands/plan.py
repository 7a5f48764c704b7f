"""The command `python -m labs plan`: a plan for a model on a cluster.

python -m labs plan llama3-70b --gpus 32 --batch 512
python -m labs plan llama3-8b --gpus 8 --software compiled --layout shards=8,batch=2
python -m labs plan llama3-8b --gpus 12 --node 4 --card "RTX 4090" --context 32k
python -m labs plan --config model/config.json --gpus 8
python -m labs plan qwen3-30b-a3b --gpus 8 --cluster B200 --software bridge --bits 8 --context 4096
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import DisallowNone, Positional, arg

from labs.kit.commands.names import known
from labs.llama import read_config
from labs.llama.config_json import read_json
from labs.model import PRESETS
from labs.plan.choice import priced, search
from labs.plan.constants import FITTED
from labs.plan.layout import Layout
from labs.plan.machines import CLUSTERS, Cluster
from labs.plan.reasons import evidence, explain, mesh, spent
from labs.plan.results import HEAD, Found, gb, row, table
from labs.plan.sparse import KNOWN, SPARSE, Shape, read_sparse

MODELS = PRESETS | SPARSE
KIND = "H100, InfiniBand"
FIELDS = ", ".join(Layout._fields)


@dataclass
class Planning:
    """Find every layout in which a model fits on a cluster, the fastest first, and say why."""

    model: Annotated[Positional[str | None], arg(metavar="[MODEL]", help=f"one of {', '.join(MODELS)}")] = None
    config: str | None = None  # config.json of a Llama or of a model with experts, in place of a model
    gpus: int = 32  # number of GPUs
    cluster: Annotated[str | None, arg(help=f"{' | '.join(CLUSTERS)}; by default {KIND}")] = None
    node: int | None = None  # GPUs of a node; by default the cluster's
    card: str | None = None  # a kind of cluster whose card it is, like 'RTX 4090', or the card's memory, like 24GB
    software: Annotated[str, arg(help=f"training software, which selects constants: {', '.join(FITTED)}")] = "pytorch"
    bits: int = 16  # of the numbers that matrix products multiply: 16 or 8
    batch: int = 512  # sequences of a step, on all GPUs together
    context: str | None = None  # tokens of a sequence, like 4096 or 32k; by default the model's
    layout: Annotated[str | None, arg(help=f"one layout to price, like shards=8,tp=8: {', '.join(Layout._fields)}")] = (
        None
    )
    list: int = 10  # number of layouts to list


def main(arguments: Sequence[str]) -> int:
    """Print the layouts that fit; return 0, or 1 if none fits, or 2 if the arguments are refused."""
    chosen = tyro.cli(Planning, prog="python -m labs plan", args=arguments, config=(DisallowNone,))
    try:
        if (chosen.model is None) == (chosen.config is None):
            raise ValueError("give a model or --config config.json: one of them")
        software, context = known("software", chosen.software, FITTED), tokens(chosen.context)
        cluster = cluster_of(chosen.cluster, chosen.card, chosen.node, chosen.gpus)
        config = config_of(chosen.model, chosen.config, context)
        layout = chosen.layout and fields(chosen.layout)
        found = search(config, cluster, chosen.batch, context, software, chosen.bits)
        lines = [one(found, layout)] if layout else all_of(found, chosen.list)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0 if found.best else 1


# ---- reading arguments -----------------------------------------------------------------------------------


def tokens(text: str | None) -> int | None:
    """Return a number of tokens; 32k is 32,768."""
    if text is None:
        return None
    if not re.fullmatch(r"[1-9]\d*k?", text):
        raise ValueError(f"{text!r} is no number of tokens: write it like 4096 or 32k")
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
            usual = ", ".join(f"{name}={usual}".lower() for name, usual in Layout._field_defaults.items())
            raise ValueError(f"{word!r} is no field of a layout: write some of {usual}")
    return found


def cluster_of(kind: str | None, card: str | None, node: int | None, gpus: int) -> Cluster:
    """Return the cluster of a kind, with another card or size of node; a card without a kind selects its own kind."""
    base = CLUSTERS[known("cluster", kind or KIND, CLUSTERS)]
    if card and (size := re.fullmatch(r"(\d+(?:\.\d+)?)\s*GB?", card, re.IGNORECASE)):
        base = replace(base, card=float(size[1]) * 1e9)
    elif card:
        like = next((each for each in CLUSTERS.values() if each.name.lower().startswith(card.lower())), None)
        if like is None:
            raise ValueError(f"card {card!r} is not known: give its memory, like 24GB, or one of {', '.join(CLUSTERS)}")
        its = {"card": like.card, "memory": like.memory, "flops": like.flops, "power": like.power}
        base = replace(base, name=f"{like.name} in {base.name}", **its) if kind else like
    return replace(base, node=node or base.node, gpus=gpus)


def config_of(model: str | None, path: str | None, context: int | None) -> Shape:
    """Return the model's shape; its positions are rotary, so any context is possible."""
    if path and Path(path).name != "config.json":
        raise ValueError(f"config {path!r}: give a file of the name config.json, as Hugging Face keeps it")
    config = config_in(Path(path).parent) if path else MODELS[known("model", model, MODELS)]
    return replace(config, context=max(context or 0, config.context))


def config_in(folder: Path) -> Shape:
    """Return the shape in a folder's config.json: of a model with experts if it names one, or of a Llama."""
    kind = read_json(folder / "config.json").get("model_type")
    return read_sparse(folder) if kind in KNOWN else read_config(folder)


# ---- the output -------------------------------------------------------------------------------------------


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
