"""Draw the pictures that stand in the notebooks' prose: `make images` writes them to images/*.svg.

    course_map        where each notebook stands                        00, README
    front             four ways to train a model, as recorded           README (tools/front_images.py)
    cluster           two nodes, and the speeds of their links          00 (tools/cluster_images.py)
    job               a call, four processes, four values               00
    one_step          what one device holds when                        01
    collectives       what each collective does, before and after       02
    ring_all_reduce   its two phases, round by round                    02
    ddp_holds         what four copies hold                             03
    overlap           one step with naive, bucketed, overlapped DDP     03
    zero_stages, zero_step, stage3_layer                                04 (tools/memory_images.py)
    layer_shapes, layer_keeps, recompute, tiers                         07, 07b (tools/memory_images.py)
    checkpoint, cheap_save, resume, async_save                          08, 08b (tools/checkpoint_images.py)
    fsdp_table, fsdp_prefetch, fsdp_flight                              06 (tools/fsdp_images.py)
    tp_pair, tp_borders, sp_borders, tp_types, split_loss               09, 09b (tools/tp_images.py)
    pp_flow                                                             10 (tools/pp_images.py)
    three_axes                                                          11 (tools/mesh_images.py)
    plan_sieves, plan_exposed, plan_forecast                            15 (tools/plan_images.py)

Each is drawn from data (tools/sketch.py), in the same palette as the figures in the cells, so the same sources give
the same bytes. To add a notebook, add a line to COURSE; to add a picture, add a function to PICTURES.
"""

from collections.abc import Callable
from pathlib import Path

from labs.kit.drawing.collective_messages import after, by_round, grid, own, stripes
from labs.kit.drawing.palette import INK, KINDS, MUTED, NAMES, PAPER, RANKS, SOFT, TIMELINE, ink
from labs.kit.drawing.picture import Drawing
from tools.checkpoint_images import async_save, cheap_save, checkpoint, resume
from tools.cluster_images import cluster
from tools.front_images import front
from tools.fsdp_images import fsdp_flight, fsdp_prefetch, fsdp_table
from tools.memory_images import (
    layer_keeps,
    layer_shapes,
    recompute,
    stage3_layer,
    tiers,
    zero_stages,
    zero_step,
)  # fmt: skip
from tools.mesh_images import three_axes
from tools.plan_images import plan_exposed, plan_forecast, plan_sieves
from tools.pp_images import pp_flow
from tools.sketch import Sketch
from tools.tp_images import sp_borders, split_loss, tp_borders, tp_pair, tp_types

IMAGES = Path(__file__).resolve().parent.parent / "images"
# The notebooks of COURSE that exist; the map draws the others dashed.
READY = {source.stem.partition("_")[0] for source in (IMAGES.parent / "solutions").glob("[0-9]*.py")}

COURSE = {
    "One device": [
        ("00", "Start here", "a job is a call"),
        ("01", "One device", "the reference curve"),
    ],
    "Split the batch": [
        ("02", "Collectives", "who sends what to whom"),
        ("03", "DDP", "copies that agree"),
    ],
    "Split the state": [
        ("04", "ZeRO", "the spare copies go"),
        ("05", "Mesh and DTensor", "ranks as a grid"),
        ("06", "FSDP", "gather, use, drop"),
        ("07", "Memory", "activations, computed twice"),
        ("07b", "Offload", "state on another tier"),
        ("08", "Checkpoint", "save on 4, load on 3"),
        ("08b", "Resume", "as if nothing happened"),
    ],
    "Split the model": [
        ("09", "Tensor parallel", "split every matrix"),
        ("09b", "Plan and wire", "how, and when it pays"),
        ("10", "Pipeline", "split the depth"),
        ("11", "Three dimensions", "all axes at once"),
        ("11b", "Clusters", "two hosts, and a queue"),
        ("12", "Long contexts", "split the sequence"),
        ("12b", "Experts", "tokens travel to MLPs"),
    ],
    "At work": [
        ("13", "GSPMD", "the compiler splits"),
        ("14", "DeepSpeed", "ZeRO by configuration"),
        ("15", "Plan a run", "which of these, and why"),
        ("16", "Bug clinic", "what went wrong here?"),
    ],
}


def course_map() -> Drawing:
    listed = [(number, name) for notebooks in COURSE.values() for number, name, _ in notebooks]
    words = "; ".join(f"{number} {name}" for number, name in listed)
    high = 66 + 66 * max(map(len, COURSE.values()))
    canvas = Sketch(990, high, "Map of the course", f"Notebooks in order, in five columns: {words}.")
    for column, (title, notebooks) in enumerate(COURSE.items()):
        x = 14 + 194 * column
        canvas.column(x + 93, 28, title)
        for row, (number, name, idea) in enumerate(notebooks):
            y, ready = 52 + 66 * row, number in READY
            canvas.rect(
                x, y, 186, 54, fill=RANKS[0] if ready else PAPER, stroke=INK if ready else MUTED,
                radius=6, dash="" if ready else "5 4",
            )  # fmt: skip
            canvas.text(x + 12, y + 18, f"{number}  {name}", size=13, anchor="start", weight="bold")
            canvas.text(x + 12, y + 38, idea, size=12, anchor="start", fill=MUTED if not ready else INK)
        if column:
            canvas.arrow((x - 14, 28), (x + 6, 28), stroke=MUTED, head=7)
    if len(listed) > len(READY):
        canvas.note(16, high - 16, "dashed: still to come")
    return canvas.drawing()


def job() -> Drawing:
    canvas = Sketch(
        900, 300, "A job is a function call with a value",
        "A cell calls run(train, ranks=4). The function travels by value to a fork server that has already "
        "imported torch; it forks four processes, rank 0 to rank 3, which talk to each other in one process "
        "group. What each rank returned comes back as a list, values[0] to values[3].",
    )  # fmt: skip
    canvas.text(150, 28, "notebook", weight="bold", size=15)
    canvas.rect(20, 48, 260, 132, fill=SOFT, radius=6)
    code = ["def train(steps):", "    ...", "    return losses", "", "values = run(train, 20, ranks=4)"]
    for line, words in enumerate(code):
        indent = 20 * (len(words) - len(words.lstrip()) > 0)
        canvas.text(34 + indent, 68 + 23 * line, words.strip(), size=14, anchor="start")
    canvas.rect(20, 222, 260, 44, fill=SOFT, radius=6)
    canvas.text(150, 244, "values[0] … values[3]", size=14)
    canvas.arrow((150, 184), (150, 218), stroke=MUTED)

    canvas.text(456, 28, "fork server", weight="bold", size=15)
    canvas.rect(386, 74, 140, 80, fill=SOFT, radius=6)
    canvas.lines(456, 94, ["torch imported,", "waiting to fork", "a rank"], size=13, leading=1.5)
    canvas.arrow((284, 114), (382, 114))
    canvas.lines(333, 82, ["the function,", "by value"], size=12.5, fill=MUTED)

    canvas.text(756, 28, "four processes", weight="bold", size=15)
    canvas.rect(640, 44, 232, 224, fill="none", stroke=KINDS["comm"], radius=10, dash="6 4", line=1.5)
    for rank in range(4):
        y = 56 + 46 * rank
        canvas.rect(656, y, 200, 36, fill=RANKS[rank], radius=6)
        canvas.text(756, y + 18, f"rank {rank}: train(20)", size=14)
        canvas.arrow((530, 114), (652, y + 18), stroke=MUTED, line=1.5)
    canvas.text(756, 252, "one process group", size=12.5, fill=KINDS["comm"], weight="bold")
    canvas.arrow((636, 244), (284, 244))
    canvas.text(460, 228, "what each rank returned", size=12.5, fill=MUTED)
    canvas.text(460, 262, "or the traceback of the first that failed", size=12.5, fill=MUTED)
    return canvas.drawing()


def one_step() -> Drawing:
    canvas = Sketch(
        900, 358, "What one device holds during one training step",
        "Schematic. Parameters are held all the time. Activations grow during forward and are freed during "
        "backward. Gradients grow during backward and stay until zero_grad. Optimizer state exists from the "
        "first step on and stays. Temporaries come and go in every operation.",
    )  # fmt: skip
    left, phases = 190, {"forward": 210, "backward": 290, "step": 110, "zero_grad": 80}
    edges, top, bottom = [left], 56, 300
    for name, width in phases.items():
        canvas.text(edges[-1] + width / 2, 34, name, size=14, weight="bold")
        edges.append(edges[-1] + width)
    begin, turn, grown, stepped, end = edges
    lanes = {kind: top + 8 + 48 * row for row, kind in enumerate(("P", "S", "A", "G", "temporary"))}
    for kind, y in lanes.items():
        named = f"{kind}  {NAMES[kind]}" if len(kind) == 1 else NAMES[kind]
        canvas.text(24, y + 18, named, size=14, anchor="start")
    for x in edges[1:-1]:
        canvas.line((x, top - 4), (x, bottom), stroke="#C9CDD2", dash="4 4")
    for kind, words in {"P": "always", "S": "always, from the first step on"}.items():
        canvas.box(begin, lanes[kind], end - begin, 36, words, KINDS[kind])
    y = lanes["A"] + 36
    canvas.area((begin, y), (turn, y - 36), (grown, y), fill=KINDS["A"])
    canvas.text(turn, y - 11, "saved for backward", size=13, fill=ink(KINDS["A"]))
    y = lanes["G"] + 36
    canvas.area((turn, y), (grown, y - 36), (stepped, y - 36), (stepped, y), fill=KINDS["G"])
    canvas.text((grown + stepped) / 2 - 8, y - 18, "until zero_grad", size=13, fill=ink(KINDS["G"]))
    y = lanes["temporary"] + 36
    for number, height in enumerate([14, 20, 12, 24, 16, 22, 30, 18, 34, 20, 28, 16, 22, 26]):
        canvas.rect(begin + 6 + 44 * number, y - height, 22, height, fill=KINDS["temporary"], radius=0)
    canvas.line((begin, bottom), (end, bottom))
    canvas.text((begin + end) / 2, 318, "time →", size=13, fill=MUTED)
    canvas.note(24, 340, "Schematic: the notebook measures the real one.")
    return canvas.drawing()


def collectives() -> Drawing:
    everyone = [{p: {r} for p in range(4)} for r in range(4)]
    root, nobody = [everyone[0], {}, {}, {}], [{}, {}, {}]
    summed = {p: {0, 1, 2, 3} for p in range(4)}
    parts = [{r: {r}} for r in range(4)]
    panels = {
        "broadcast": (root, [everyone[0]] * 4, "one tells all"),
        "reduce": (everyone, [summed, *nobody], "the sum, on one rank"),
        "all_reduce": (everyone, [summed] * 4, "the sum, on all ranks"),
        "all_gather": (parts, [{r: {r} for r in range(4)}] * 4, "all the pieces, on all ranks"),
        "reduce_scatter": (
            everyone,
            [{r: summed[r]} for r in range(4)],
            "each rank keeps one piece of the sum",
        ),
        "all_to_all": (everyone, None, "rank r gets everybody's piece r"),
    }
    words = "; ".join(f"{name}: {meaning}" for name, (_, _, meaning) in panels.items())
    canvas = Sketch(944, 412, "The collectives, before and after", f"On four ranks. {words}.")
    for number, (name, (held, then, meaning)) in enumerate(panels.items()):
        x, y = 16 + 310 * (number % 3), 28 + 190 * (number // 3)
        canvas.heading(x, y, name, size=15)
        canvas.note(x, y + 20, meaning)
        grid(canvas, x, y + 36, held, range(4), cell=(32, 26), named=False)
        canvas.arrow((x + 132, y + 88), (x + 154, y + 88), stroke=KINDS["comm"])
        if then is not None:
            grid(canvas, x + 158, y + 36, then, range(4), cell=(32, 26), named=False)
            continue
        for rank in range(4):
            for sender in range(4):
                box = (x + 160 + 32 * sender, y + 38 + 26 * rank, 28, 22)
                stripes(canvas, box, [sender], f"{'abcd'[sender]}{rank}")
    key = "A row is a rank. a0: piece 0 of rank 0's tensor; Σ0: the sum of everybody's piece 0."
    canvas.note(16, 394, key)
    return canvas.drawing()


def ring(ranks: int) -> list[tuple[int, int, int, int]]:
    """Return the messages of a ring all-reduce: rank r ends the first phase with the sum of piece r."""
    gather = ranks - 1
    first = [(k, r, (r + 1) % ranks, (r - k - 1) % ranks) for k in range(gather) for r in range(ranks)]
    second = [(gather + k, r, (r + 1) % ranks, (r - k) % ranks) for k in range(gather) for r in range(ranks)]
    return first + second


def ring_all_reduce() -> Drawing:
    messages = ring(4)
    canvas = Sketch(
        970, 400, "The two phases of a ring all-reduce",
        "Four ranks, four pieces. In each round every rank sends one piece to the next rank. After three "
        "rounds (reduce-scatter) each rank has one piece of the full sum; after three more (all-gather) all "
        "ranks have all of it.",
    )  # fmt: skip
    held = own(4, 4)
    states = [("start", held, set())]
    for number, sent in enumerate(by_round(messages)):
        held = after(held, sent)
        states.append((f"round {number + 1}", held, {(m[2], m[3]) for m in sent}))
    for number, (name, now, new) in enumerate(states):
        row, column = (0, number) if number < 4 else (1, number - 3)
        x, y = 70 + 224 * column, 60 + 178 * row
        canvas.text(x + 104, y - 12, name, size=13)
        grid(canvas, x, y, now, range(4), new, cell=(52, 28), named=column == (1 if row else 0))
    canvas.heading(20, 22, "1  reduce-scatter: pieces are summed as they travel", size=15)
    canvas.heading(20, 204, "2  all-gather: the sums travel on", size=15)
    box = (36, 300, 30, 20)
    stripes(canvas, box, [0], "", new=True)
    canvas.note(74, 304, ["just arrived from", "the rank before"])
    key = "a0: piece 0 of rank 0. a+b: the sum of two ranks. Σ0: the sum over all ranks."
    canvas.note(20, 380, key)
    return canvas.drawing()


def ddp_holds() -> Drawing:
    canvas = Sketch(
        900, 392, "What four ranks of DDP hold",
        "Every rank has its own quarter of the batch and its own activations. Parameters, gradients (after the "
        "all-reduce) and optimizer state are the same on all four.",
    )  # fmt: skip
    rows = {"A": (104, 40), "P": (160, 40), "G": (216, 40), "S": (272, 64)}
    canvas.rect(128, 208, 756, 56, fill="#FBE9DD", stroke=KINDS["comm"], dash="6 4", line=1.5, radius=8)
    canvas.lines(16, 226, ["all-reduce:", "the mean"], size=13, anchor="start", weight="bold", fill="#A84800")
    for name, y in {"differs": 102, "same": 180, "same ": 304}.items():
        canvas.text(16, y, name.strip(), size=13, anchor="start", fill=MUTED)
    for rank in range(4):
        x = 140 + 186 * rank
        canvas.column(x + 87, 26, f"rank {rank}")
        canvas.rect(x, 44, 174, 40, fill=RANKS[rank])
        canvas.text(x + 87, 64, f"quarter {rank} of the batch", size=13)
        for kind, (y, height) in rows.items():
            words = f"{kind}  {NAMES[kind]}" + (f" {rank}" if kind == "A" else "")
            canvas.box(x, y, 174, height, words, KINDS[kind])
    words = "Four copies of P, G and S: DDP splits the work, not the memory. Equal gradients keep the copies equal."
    canvas.text(16, 366, words, size=13, anchor="start", fill=MUTED)
    return canvas.drawing()


def overlap() -> Drawing:
    canvas = Sketch(
        956, 420, "One step of naive, bucketed and overlapped DDP",
        "Schematic, not measured. Naive: after backward, one all-reduce a parameter, one after the other. "
        "Bucketed: the same bytes in two all-reduces. Overlapped: the first bucket is on its way while backward "
        "still computes the gradients of the second.",
    )  # fmt: skip
    compute = [("forward", 0, 8), ("b4", 8, 4), ("b3", 12, 4), ("b2", 16, 4), ("b1", 20, 4)]
    steps = {
        "naive": [(f"g{4 - i}", 24 + 5 * i, 5) for i in range(4)],
        "bucketed": [("g4 g3", 24, 8), ("g2 g1", 32, 8)],
        "overlapped": [("g4 g3", 16, 8), ("g2 g1", 24, 8)],
    }
    left, unit, tall = 130, 17, 34
    for row, (name, sent) in enumerate(steps.items()):
        y = 66 + 110 * row
        done = sent[-1][1] + sent[-1][2]
        canvas.heading(20, y + tall, name, size=15)
        spans = [(what, start, long, "compute") for what, start, long in compute]
        spans += [("waiting", 24, done - 24, "waiting"), ("step", done, 3, "compute")]
        for what, start, long, doing in spans:
            canvas.box(left + unit * start, y, unit * long, tall, what, TIMELINE[doing])
        for what, start, long in sent:
            canvas.box(left + unit * start, y + tall + 6, unit * long, tall, what, TIMELINE["communication"])
    for number, (name, colour) in enumerate(TIMELINE.items()):
        canvas.rect(left + 160 * number, 20, 18, 18, fill=colour)
        canvas.text(left + 26 + 160 * number, 29, name, anchor="start")
    words = "Schematic: b4 is the backward of layer 4, g4 the all-reduce of its gradient. The notebook measures."
    canvas.note(20, 400, words)
    return canvas.drawing()


PICTURES: list[Callable[[], Drawing]] = [
    course_map, front, cluster, job, one_step, collectives, ring_all_reduce, ddp_holds, overlap,
    zero_stages, zero_step, stage3_layer, layer_shapes, layer_keeps, recompute, tiers, checkpoint, cheap_save,
    resume, async_save, fsdp_table, fsdp_prefetch, fsdp_flight, tp_pair, tp_borders, sp_borders, tp_types, split_loss,
    pp_flow, three_axes, plan_sieves, plan_exposed, plan_forecast,
]  # fmt: skip


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    for picture in PICTURES:
        picture().save(IMAGES / f"{picture.__name__}.svg")
        print(f"images/{picture.__name__}.svg")


if __name__ == "__main__":
    main()
