"""Every kind of picture once, and its snapshot: its words, and the colours and the rounded places of its shapes.

    python -m tests.kit.drawing.gallery [NAME ...]      writes the snapshots anew; git shows what has changed

A snapshot does not depend on fonts: of a figure by matplotlib it has the data, in the units of the axes.
"""

import re
import sys
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace as Fake

import torch
import torch.distributed as dist
from matplotlib.colors import to_hex
from matplotlib.ticker import FixedLocator

from labs import pp
from labs.cp import Pieces, contiguous, striped, zigzag
from labs.dtensor import Partial, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.kit import draw
from labs.kit.drawing import gpu_memory_bars
from labs.kit.watch.folder_snapshots import FolderSnapshot
from labs.model import GPT, PRESETS
from labs.tp import ColwiseParallel, LossParallel, gpt_plan
from tests.kit.pictures import RING, SVG, busy, drawn, less, recording

SNAPSHOTS = Path(__file__).parent / "snapshots"

# ---- drawings --------------------------------------------------------------------------------------------

GB = 10**9
HELD = {
    "DDP": {"P": 16 * GB, "G": 16 * GB, "S": 96 * GB, "A": 30 * GB, "comm": 0, "temporary": 2 * GB, "peak": 150 * GB},
    "stage 3": {"P": GB, "G": GB, "S": 6 * GB, "A": 30 * GB, "comm": GB, "temporary": 2 * GB, "peak": 41 * GB},
}
FITS = {"DDP": dict.fromkeys(gpu_memory_bars.CARDS), "stage 3": {24: None, 40: 64, 80: 8, 141: 2}}
LONG = {"DDP": HELD["DDP"] | {"S": 5e12, "peak": 5e12}}
SHORT, ONE = {"stage 3": HELD["stage 3"]}, {"one": {"P": 3 * GB, "peak": 3 * GB}}
SMALL = {"one": {"P": 1000, "A": 3000, "peak": 3500}}
MEASURED = {"stage 3": HELD["stage 3"] | {"A": 40 * GB, "peak": 52 * GB}, "mine": {"P": 5 * GB, "peak": 6 * GB}}


def on_cards(held, fits=FITS, **more):
    return partial(gpu_memory_bars.cards, held, fits, "a model", **more)


TREE = [(k, r, r + 2**k, 0) for k in range(3) for r in range(2**k)]
DOUBLING = [(k, r, r ^ 2**k, 0) for k in range(3) for r in range(8)]
MOMENTS = [FolderSnapshot("make step-1.draft", (), ""), FolderSnapshot("flush", ("step-1.draft/index.json",), "step-0")]
EVERYBODY = [(0, s, d, d) for s in range(5) for d in range(5) if s != d]
POINTS = [draw.Point(10, 1000, "one", "ten & <more>"), draw.Point(100, 100, "other", "a hundred")]
ALONE = {"head": ColwiseParallel(output_layouts=Replicate())}


def summed(gradient, kind, mesh):
    for axis in {"summand": ("dp", "tp"), "tied": ("dp", "pp")}.get(kind, ("dp",)):
        dist.all_reduce(gradient, group=mesh.get_group(axis))
    gradient /= mesh.size("dp")


LINES = {"flat": [(1, 4.0), (6, 4.0)], "rising": [(1, 1.5), (6, 9.0)]}
ON_TWO_NODES = Fake(
    ranks=4,
    link=Fake(nodes=2),
    select=lambda rank, step: [
        Fake(to={rank ^ (1 + step): 4_000_000}, group="mesh_tp"),
        Fake(to={rank ^ (2 - step): 900_000}, group="mesh_dp"),
    ],
)
IN_ORDER = Fake(
    ranks=4,
    link=Fake(nodes=2, across=lambda rank, to, ranks: sum(n for other, n in to.items() if other // 2 != rank // 2)),
    select=lambda rank, step: [
        Fake(to={rank ^ 2: 900}, group="mesh_pp", ranks=(0, 2), start=0.11, end=0.13, waits=((0.12, 0.13),)),
        Fake(to={rank ^ 1: 4000}, group="mesh_tp", ranks=(0, 1), start=0.14, end=0.19, waits=()),
    ],
    window=lambda rank, step: (0.1, 0.2),
)
PREDICTED = [{"pp": 100 + 10 * rank, "shard": 400, "tp": 900, "P": 300, "G": 300, "S": 600} for rank in range(2)]
NEARLY = [rank | {"tp": 960} for rank in PREDICTED]
PRODUCTS = {
    "A": (((8, 4), (4, 2)), (Shard(0), Replicate(), Shard(0))),
    "C": (((8, 4), (4, 2)), (Shard(1), Shard(0), Shard(0))),
}
SENT = {
    "A": {"XLA": (0, "nothing"), "ours": (0, "nothing")},
    "C": {"XLA": (48, "all-reduce"), "ours": (30, "all-to-all + all-gather")},
}

CHOSEN = torch.tensor([[[0, 1], [0, 3], [2, 3]], [[0, 2], [0, 1], [0, 1]]])
LOADS = {"none": [[4, 4, 4], [8, 3, 1], [9, 3, 0]], "bias": [[4, 4, 4], [7, 3, 2], [5, 4, 3]]}

DRAWINGS = {
    "travel": lambda: draw.travel(CHOSEN, experts=4),
    "travel without tokens": lambda: draw.travel([CHOSEN[0, :, :1], CHOSEN[0, :0, :1], CHOSEN[1, :, 1:]], experts=5),
    "ring steps": lambda: draw.ring_steps(Pieces(zigzag(16, 4))),
    "ring steps of backward": lambda: draw.ring_steps(Pieces(contiguous(4, 4)), backward=True),
    "ring steps of uneven pieces": lambda: draw.ring_steps(Pieces(striped(11, 3))),
    "ring steps of two documents": lambda: draw.ring_steps(Pieces(zigzag(32, 2), torch.arange(32)[None] // 13)),
    "work per rank": lambda: draw.work_per_rank({cut.__name__: cut(64, 4) for cut in (contiguous, zigzag, striped)}),
    "work of eight ranks": lambda: draw.work_per_rank({cut.__name__: cut(100, 8) for cut in (contiguous, zigzag)}),
    "keys by way": lambda: draw.keys_by_way(ranks=4, rank=1, heads=8, kv_heads=4),
    "merged softmax": lambda: draw.merged_softmax([2.0, 1.0, 3.0, 0.0], [10.0, 20.0, 30.0, 40.0], cut=2),
    "orders": lambda: draw.orders({"pp × tp": IN_ORDER}, 1, {"pp": 2, "tp": 2}),
    "sent and held": lambda: draw.sent_and_held(PREDICTED, {"ours": PREDICTED, "PyTorch's": NEARLY}),
    "node bound": lambda: draw.node_bound(nodes=4, stages=2),
    "products": partial(draw.products, PRODUCTS, SENT),
    "ring": lambda: draw.messages(RING, 4),
    "tree": lambda: draw.messages(TREE, 8),
    "doubling": lambda: draw.messages(DOUBLING, 8),
    "all to all": lambda: draw.messages(EVERYBODY, 5),
    "nothing": lambda: draw.messages([], 1),
    "step": lambda: draw.step(RING, 4, 3),
    "mesh": lambda: draw.mesh({"data": 2, "tensor": 4}),
    "axis": lambda: draw.mesh({"data": 8}),
    "groups": lambda: draw.mesh({"data": 2, "tensor": 4}, along="data"),
    "groups of one axis": lambda: draw.mesh({"data": 3}, along="data"),
    "nodes": lambda: draw.nodes({"pp": 4, "shard": 2, "tp": 8}, node=8),
    "weight cut": lambda: draw.weight_cut({"pp": 2, "shard": 2, "tp": 2}, rank=5),
    "buckets": lambda: draw.buckets({"first": 900, "middle": 300, "last": 600}, capacity=1000, ranks=2),
    "crossings": lambda: draw.crossings(LINES, {"flat": "G", "rising": "A"}, "tokens", "MB", {"rising": [(2, 3)]}),
    "on scales": lambda: draw.on_scales(LINES, "tokens", "MB", dots={"XLA": [(2, 3)], "annotated": [(2, 4)]}),
    "wire": lambda: draw.wire(ON_TWO_NODES, {"dp × tp": 0, "tp × dp": 1}, {"dp": "P", "tp": "A"}),
    "who combines": lambda: draw.who_combines({"pp": 2, "dp": 2, "tp": 2}, summed),
    "nodes as a rank sees them": lambda: draw.nodes({"pp": 2, "replicate": 1, "tp": 4}, node=4, rank=5),
    "rows by rank": lambda: draw.rows_by_rank({"even": [64, 62, 66, 64], "skewed": [256, 0, 0, 0]}, [64, 64]),
    "blocks": lambda: draw.blocks(Spec((7, 5), (2, 3), (Shard(0), Shard(1))), ("data", "tensor")),
    "summands": lambda: draw.blocks(Spec((12,), (4,), (Partial(),)), ("data",)),
    "empty blocks": lambda: draw.blocks(Spec((3, 4), (4,), (Shard(0),)), ("data",)),
    "plan": lambda: draw.plan(gpt_plan(PRESETS["small"]), GPT(PRESETS["small"])),
    "ratios": lambda: draw.ratios({"small": {"slow": 112, "fast": 0.3}}, ("shorter", "longer"), "times"),
    "plan by tokens": lambda: draw.plan(gpt_plan(PRESETS["small"], True), GPT(PRESETS["small"])),
    "plan of the head": lambda: draw.plan(ALONE, GPT(PRESETS["small"])),
    "plan without a weight": lambda: draw.plan({"loss": LossParallel(256)}, GPT(PRESETS["tiny"]), ranks=3),
    "reads": lambda: draw.reads(12, 4, 3),
    "folder": lambda: draw.folder(MOMENTS, 1),
    "chart": lambda: draw.chart({"ring": 0.0012, "recursive doubling": 0.0031}, "s", caption="8 ranks, 1 MB"),
    "stacked": lambda: draw.chart({"stage 0": {"P": 4, "G": 4, "S": 8}, "stage 3": {"P": 1, "G": 1, "S": 2}}),
    "chart with words": lambda: draw.chart(
        {"a": {"waiting": 3.0, "comm": 1.0}}, "%", words={"waiting": "work done again"}
    ),
    "scatter": lambda: draw.scatter(POINTS, "measured", "planned", diagonal=True),
    "wrong schedule": lambda: draw.schedule([[pp.F(0, 0), pp.B(0, 0), pp.F(0, 1)], [pp.F(1, 0), pp.F(1, 1)]]),
    "schedule without a forward": lambda: draw.schedule([[pp.F(0, 0), pp.B(0, 0)], [pp.B(1, 0)]]),
    "interleaved schedule of three stages": lambda: draw.schedule(pp.interleaved(2, 4, 3)),
    "cards": on_cards(HELD),
    "cards, one asked for": on_cards(HELD, card=80),
    "cards, a long bar": on_cards(HELD | LONG, card=80),
    "cards, a short bar": on_cards(ONE, {}, card=80),
    "cards, three stages": on_cards(HELD | {"stage 3, as it was measured": HELD["stage 3"]}),
    "cards, one stage": on_cards(SHORT),
    "cards, small models": on_cards(SMALL, {"one": dict.fromkeys(gpu_memory_bars.CARDS, 1)}),
    "cards, measured": on_cards(HELD, measured=MEASURED),
    "cards, a long bar, measured": on_cards(HELD | LONG, measured=HELD | LONG),
} | {f"{name} schedule": partial(draw.schedule, lists(2, 4)) for name, lists in pp.SCHEDULES.items()}  # fmt: skip


def lines_of(drawing) -> Iterator[str]:
    yield from [drawing.alt, *drawing.text.splitlines(), *map(str, getattr(drawing, "areas", ()))]
    for shape in xml.fromstring(drawing.svg).iter():
        tag = shape.tag.removeprefix(SVG)
        if tag not in ("svg", "title", "desc"):
            looks = [value for key, value in shape.items() if key not in ("rx", "stroke-linejoin")]
            yield " ".join([tag, *map(rounded, looks), *([shape.text] if shape.text else [])])


def rounded(words: str) -> str:
    return re.sub(r"-?\d+\.\d+", lambda number: f"{round(float(number[0]))}", words)


# ---- figures ---------------------------------------------------------------------------------------------

NAMED = {"step": 1, "ranks": [0], "names": ("one device", "stage 3")}
KINDS = {"P": 9e6, "G": 1e5, "S": 2e6, "comm": 8e5, "peak": 1e7}
FIGURES = {
    "expert loads": (draw.expert_loads, [LOADS], {}),
    "rank by axis": (draw.rank_by_axis, [IN_ORDER], {"rank": 0, "step": 1}),
    "timeline": (draw.timeline, [recording()], {}),
    "timeline of a busy step": (draw.timeline, [busy()], {"step": 0}),
    "two timelines": (draw.timeline, [busy(), busy(1)], {"step": 0, "names": ("ours", "native")}),
    "memory": (draw.memory, [recording(4)], {"step": 1}),
    "all of it": (draw.memory, [recording(1)], {}),
    "much less": (draw.memory, [recording(), less()], NAMED),
    "a little less": (draw.memory, [recording(), less(share=0.97)], NAMED),
    "more": (draw.memory, [recording(), less(share=1.4)], NAMED),
    "bars": (draw.bars, [{name: KINDS for name in ("one", "two")}], {}),
    "apart": (draw.apart, [{"yours": [5.5, 4.0, 3.5], "the file": [5.5, 4.1, 3.52], "mended": [5.5, 4.0, 3.5]}], {}),
    "curves": (draw.curves, [{"one process": [5.5, 4.0], "DDP": [5.5, 4.1]}], {"marks": {"entropy": 3.1}}),
}


def lines_of_figure(canvas, picture) -> Iterator[str]:
    yield from [picture.alt, *picture.text.splitlines()]
    for axes in canvas.axes:
        yield f"axes {numbers(axes.get_xlim())} by {numbers(axes.get_ylim())}"
        legend = axes.get_legend()
        titles = [axes.get_title(loc=side) for side in ("left", "center", "right")]
        words = [*titles, axes.get_xlabel(), axes.get_ylabel(), *(text.get_text() for text in axes.texts)]
        words += [text.get_text() for text in legend.get_texts()] if legend else []
        for axis in (axes.xaxis, axes.yaxis):
            if isinstance(axis.get_major_locator(), FixedLocator):
                words += [text.get_text() for text in axis.get_ticklabels() if text.get_visible()]
        yield from (f"words {each}".strip() for each in words if each)
        for line in axes.lines:
            yield f"line {numbers(line.get_xydata().flat)} {to_hex(line.get_color())} {line.get_linestyle()}"
        for patch in axes.patches:
            yield f"box {numbers(patch.get_extents().transformed(axes.transData.inverted()).bounds)} {fill(patch)}"
        for each in axes.collections:
            if paths := each.get_paths():
                colours = ", ".join(dict.fromkeys(map(to_hex, each.get_facecolor())))
                yield f"area {'; '.join(numbers(path.get_extents().bounds) for path in paths)} {colours}"


def fill(patch) -> str:
    return f"{to_hex(patch.get_facecolor())} {patch.get_hatch() or ''}".strip()


def numbers(values) -> str:
    return " ".join(f"{value:.3g}" for value in values)


# ---- snapshots -------------------------------------------------------------------------------------------


def snapshot(name: str) -> str:
    if name in DRAWINGS:
        lines = lines_of(DRAWINGS[name]())
    else:
        figure, given, options = FIGURES[name]
        lines = lines_of_figure(*drawn(figure, *given, **options))
    return "\n".join(lines) + "\n"


def path_of(name: str) -> Path:
    return SNAPSHOTS / f"{re.sub(r'[^a-z0-9]+', '_', name)}.txt"


def main(names: list[str]) -> None:
    SNAPSHOTS.mkdir(exist_ok=True)
    for name in names or [*DRAWINGS, *FIGURES]:
        path_of(name).write_text(snapshot(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
