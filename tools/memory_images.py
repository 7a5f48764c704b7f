"""The pictures of memory: who holds what of the model's state, and when.

zero_stages    what each of four ranks holds between steps, by stage            04
zero_step      what is gathered, reduce-scattered and dropped in a step         04
stage3_layer   one layer of stage 3: gathered, used, dropped                    04
layer_shapes   the tensors of one layer, and how wide each is                   07
layer_keeps    the same, with the tensors that backward needs                   07
recompute      activations that wait for backward, and those recomputed         07
tiers          what lives on which tier, and what travels                       07b
"""

from collections.abc import Iterable
from itertools import accumulate

from labs import cost
from labs.kit.drawing.palette import KINDS, MUTED, NAMES, SOFT, TIMELINE, ink
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import width_of
from tools.sketch import GONE, Sketch

RANKS = 4
SHARDED = {"DDP": "", "stage 1": "S", "stage 2": "GS", "stage 3": "PGS"}


def quarters(canvas: Sketch, box, kind: str, held: Iterable[int], across: bool = False) -> None:
    """Draw a box cut in four, below each other or `across`; quarters that are not held are dashed."""
    x, y, width, height = box
    for part in range(RANKS):
        left, top = (x + part * width / RANKS, y) if across else (x, y + part * height / RANKS)
        wide, tall = (width / RANKS, height) if across else (width, height / RANKS)
        if part in held:
            canvas.box(left, top, wide, tall, f"{kind}{part}", KINDS[kind], size=11, radius=0)
        else:
            canvas.rect(left, top, wide, tall, radius=0, **GONE)


# ---- 04 --------------------------------------------------------------------------------------------------


def zero_stages() -> Drawing:
    pie = cost.PIE["float32"]
    copies = {name: sum(n for kind, n in pie.items() if kind not in kinds) for name, kinds in SHARDED.items()}
    held = {name: whole + (sum(pie.values()) - whole) / RANKS for name, whole in copies.items()}
    sentences = [
        f"{name}: {' and '.join(NAMES[kind] for kind in kinds) or 'nothing'} sharded, {held[name]:g} bytes each."
        for name, kinds in SHARDED.items()
    ]
    canvas = Sketch(
        986, 460, "What each of four ranks holds at rest, by stage of ZeRO", f"Per parameter: {' '.join(sentences)}"
    )
    tall = {kind: 18 * n for kind, n in pie.items()}
    tops = dict(zip(tall, accumulate(tall.values(), lambda y, height: y + height + 8, initial=64), strict=False))
    for kind, y in tops.items():
        canvas.text(16, y + tall[kind] / 2 - 9, NAMES[kind], size=13, anchor="start", weight="bold")
        canvas.note(16, y + tall[kind] / 2 + 10, f"{kind}, {pie[kind]} bytes")
    for column, (name, kinds) in enumerate(SHARDED.items()):
        left = 140 + 212 * column
        canvas.column(left + 93, 22, name)
        for rank in range(RANKS):
            canvas.text(left + 48 * rank + 21, 46, f"rank {rank}", size=11.5, fill=MUTED)
            for kind, y in tops.items():
                box = (left + 48 * rank, y, 42, tall[kind])
                quarters(canvas, box, kind, [rank] if kind in kinds else range(RANKS))
        canvas.column(left + 93, 384, f"{held[name]:g} bytes")
        canvas.text(left + 93, 404, f"on very many ranks: {copies[name]}", size=12.5, fill=MUTED)
    canvas.lines(16, 384, ["per parameter,", "on each rank"], size=13, anchor="start", weight="bold")
    key = "S2: the optimizer state of the third quarter of the parameters. Dashed: another rank has it."
    canvas.note(16, 440, f"{key} In float32, with AdamW.")
    return canvas.drawing()


# The columns of a step, each with the number of slots of equal width into which it is divided; {} is the layer.
SLOTS = {"forward": 2, "backward": 3, "sync": 1, "step": 2}
COLUMNS = [("forward", "1"), ("forward", "2"), ("forward", "3")]
COLUMNS += [("backward", "3"), ("backward", "2"), ("backward", "1"), ("sync", ""), ("step", "")]
EVENTS = {  # events of each slot, one after the other
    "stage 1": {
        "forward": ["", "compute"],
        "backward": ["", "compute"],
        "sync": ["rs G"],
        "step": ["update", "ag P"],
    },
    "stage 2": {
        "forward": ["", "compute"],
        "backward": ["", "compute", "rs G{}"],
        "step": ["update", "ag P"],
    },
    "stage 3": {
        "forward": ["ag P{}", "compute"],
        "backward": ["ag P{}", "compute", "rs G{}"],
        "step": ["update"],
    },
}
DROPPED = {  # tensors dropped at the end of a column
    "stage 1": {"sync": "drop G"},
    "stage 2": {"backward": "drop G{0}"},
    "stage 3": {"forward": "drop P{0}", "backward": "drop G{0}, P{0}"},
}
RESTS = {
    "stage 1": "all P, all G until sync, a quarter of S",
    "stage 2": "all P, a quarter of G and of S",
    "stage 3": "a quarter of each, and of the layer in use all of P",
}
LONG_NAMES = {"ag": "all_gather", "rs": "reduce_scatter"}


def zero_step() -> Drawing:
    canvas = Sketch(
        990, 358, "One step of a model of three layers, by stage of ZeRO",
        "From left to right, one thing after the other: forward and backward, layer by layer. "
        + " ".join(steps_in_words()),
    )  # fmt: skip
    left, wide, high = 96, 49, 26
    at = dict(zip(COLUMNS, accumulate((wide * SLOTS[phase] for phase, _ in COLUMNS), initial=left), strict=False))
    for (phase, layer), x in at.items():
        canvas.line((x, 14), (x, 300), stroke="#E3E6EA")
        canvas.text(x + wide * SLOTS[phase] / 2, 22, f"{phase} {layer}".strip(), size=13.5, weight="bold")
    for number, (stage, events) in enumerate(EVENTS.items()):
        top = 42 + 96 * number
        canvas.heading(16, top + high / 2, stage, size=15)
        for (phase, layer), x in at.items():
            for slot, event in enumerate(events.get(phase, [])):
                if event:
                    happening(canvas, (x + wide * slot + 1, top, wide - 2, high), event.format(layer))
            if gone := DROPPED[stage].get(phase, "").format(layer):
                long, end = width_of(gone, 11) + 4, x + wide * SLOTS[phase] - 1
                happening(canvas, (end - long, top + high + 4, long, 20), gone)
        canvas.note(left, top + high + 42, f"holds {RESTS[stage]}")
    key = "ag P1: all_gather of the parameters of layer 1; rs G1: reduce_scatter of its gradients; P, G: of all layers."
    more = "A quarter, as on four ranks. Dashed: memory given back. Order only: the widths mean nothing."
    canvas.note(16, 324, [key, more])
    return canvas.drawing()


def steps_in_words() -> Iterable[str]:
    """Yield each stage's step in words."""
    for stage, phases in EVENTS.items():
        for phase, events in phases.items():
            words = [
                event.format("").replace(event[:2], LONG_NAMES.get(event[:2], event[:2])) for event in events if event
            ]
            words += [DROPPED[stage][phase].format("")] if phase in DROPPED[stage] else []
            yield f"{stage}, {phase}: {', then '.join(words)}."


def happening(canvas: Sketch, box, event: str) -> None:
    x, y, width, height = box
    if event.startswith("drop"):
        canvas.rect(*box, **GONE)
    else:
        canvas.rect(*box, fill=KINDS["comm"] if event[:2] in LONG_NAMES else TIMELINE["compute"])
    canvas.text(x + width / 2, y + height / 2, event, size=11)


def stage3_layer() -> Drawing:
    everything = range(RANKS)
    # a moment's name, the quarters of P and of G that rank r holds, and what leads to the next moment
    moments = [
        ("at rest", "S", "", "all_gather, P"),
        ("forward", "F", "", "drop, P"),
        ("other layers", "S", "", "all_gather, P"),
        ("backward", "F", "F", "reduce_scatter, G; drop P"),
        ("until step", "S", "S", ""),
    ]
    canvas = Sketch(
        990, 366, "One layer on four ranks of stage 3, from forward to step",
        "At rest each rank holds a quarter of the layer's parameters. They are all-gathered for its forward, dropped "
        "while other layers compute, all-gathered again for its backward. Then its gradients, which each rank has "
        "whole but of its own part of the batch, are reduce-scattered: each rank keeps a quarter of their mean, and "
        "of the parameters.",
    )  # fmt: skip
    side = 108
    for column, (name, *have, then) in enumerate(moments):
        x = 74 + 200 * column
        canvas.column(x + side / 2, 24, name)
        for rank in range(RANKS):
            y = 48 + 70 * rank
            if column == 0:
                canvas.text(62, y + 14, f"rank {rank}", size=12.5, anchor="end", fill=MUTED)
            for row, (kind, which) in enumerate(zip("PG", have, strict=True)):
                if which:
                    held = everything if which == "F" else [rank]
                    quarters(canvas, (x, y + 30 * row, side, 28), kind, held, across=True)
        if then:
            left, right = x + side + 6, x + 194
            canvas.arrow((left, 190), (right, 190), stroke=KINDS["comm"] if "_" in then else MUTED)
            above, _, below = then.partition(", ")
            canvas.text((left + right) / 2, 172, above, size=11)
            canvas.text((left + right) / 2, 208, below, size=11)
    key = "P2: the third quarter of the layer's parameters, G2 that of its gradients. Dashed: not held."
    canvas.note(16, 346, key)
    return canvas.drawing()


# ---- 07 --------------------------------------------------------------------------------------------------

# The numbers per token in the notebook's model, by letter.
SIZES = {"D": 64, "KE": 32, "H": 4, "F": 160, "1": 1, "2E": 32}
# A row for each half. An operator has its outputs: each tensor's name, its letter, and whether backward needs it.
HALVES = {
    "attention": [
        ("", [("x", "D", True)]),
        ("norm", [("x / rms(x)", "D", True), ("1 / rms(x)", "1", True)]),
        ("× weight", [("input", "D", True)]),
        ("q, k, v", [("q", "D", False), ("k", "KE", False), ("v", "KE", True)]),
        ("rotary", [("q, turned", "D", True), ("k, turned", "KE", True), ("cos, sin", "2E", True)]),
        ("attention", [("y", "D", True), ("log-sum-exp", "H", True)]),
        ("side by side", [("y again", "D", True)]),
        ("o", [("o(y)", "D", False)]),
        ("+ x", [("x", "D", False)]),
    ],
    "mlp": [
        ("", [("x", "D", True)]),
        ("norm", [("x / rms(x)", "D", True), ("1 / rms(x)", "1", True)]),
        ("× weight", [("input", "D", True)]),
        ("gate, up", [("gate", "F", True), ("up", "F", True)]),
        ("silu", [("silu(gate)", "F", True)]),
        ("× up", [("product", "F", True)]),
        ("down", [("down(…)", "D", False)]),
        ("+ x", [("x", "D", False)]),
    ],
}


def layer_shapes() -> Drawing:
    return layer("The tensors of one layer, and how wide each is", colour_kept=False)


def layer_keeps() -> Drawing:
    return layer("The tensors of one layer, and which of them backward asks for", colour_kept=True)


def layer(title: str, colour_kept: bool) -> Drawing:
    """Draw one layer's tensors. colour_kept: whether the tensors kept for backward are coloured."""
    words = "; ".join(
        f"{operator or 'from before'}: "
        + ", ".join(f"{name} ({letter}{', kept' * (kept and colour_kept)})" for name, letter, kept in tensors)
        for half in HALVES.values()
        for operator, tensors in half
    )
    canvas = Sketch(
        990, 404 + 18 * colour_kept, title, f"What each operator gives, in brackets the numbers for one token. {words}."
    )
    for row, (name, half) in enumerate(HALVES.items()):
        canvas.heading(12, 20 + 196 * row, name, size=15)
        chain(canvas, 52 + 196 * row, half, colour_kept)
    key = "Coloured: kept until backward. Dashed: gone once the next operator is done."
    words = "A bar is one tensor, its length the numbers for one token; D is the width of the model."
    canvas.note(16, 388, [words, key] if colour_kept else [words])
    return canvas.drawing()


def chain(canvas: Sketch, top: float, half: list, colour_kept: bool) -> None:
    """Draw the operators over arrows, from left to right, and the outputs of each."""
    unit, high = 0.58, 22
    wide = [unit * max(SIZES[letter] for _, letter, _ in tensors) for _, tensors in half]
    gap, x = (946 - sum(wide)) / (len(half) - 1), 16.0
    for (operator, tensors), width in zip(half, wide, strict=True):
        if operator:
            canvas.text(x - gap / 2 + 6, top - 6, operator, size=11.5, fill=MUTED, style="italic")
            canvas.arrow(
                (x - gap + 22, top + high / 2 + 8), (x - 6, top + high / 2 + 8), stroke=MUTED, line=1.2, head=6
            )
        for number, (tensor, letter, kept) in enumerate(tensors):
            y, long = top + 8 + 46 * number, unit * SIZES[letter]
            held = {"fill": KINDS["A"]} if kept else GONE
            canvas.rect(x, y, max(long, 1.5), high, radius=0, **(held if colour_kept else {"fill": SOFT}))
            canvas.text(x, y + high + 9, tensor, size=11, anchor="start")
            canvas.text(x + long + 4, y + high / 2, letter, size=11.5, anchor="start", weight="bold")
        x += width + gap


LAYERS = 4
# The share of a layer's activations that each policy keeps until backward, and of a forward that it recomputes
# (labs.memory.recompute, for dim 64, 4 heads, 2 of keys and values, hidden 160).
KEPT = {
    "none": (1286 / 1286, 0.0),
    "selective": (708 / 1286, 0.3),
    "all but attention": (132 / 1286, 0.9),
    "full": (64 / 1286, 1.0),
}

AGAIN = "#D9EDF9"  # a pale tint of compute


def recompute() -> Drawing:
    most = " ".join(f"{name}: at most {peak(kept):.1f} layers' worth." for name, (kept, _) in KEPT.items())
    canvas = Sketch(
        990, 616, "Activations held in forward and backward, with recomputation and without",
        "Schematic, four layers. Without recomputation the activations of all four layers pile up in forward and go "
        "layer by layer in backward. Selective: each layer keeps about half, and computes the rest again when its "
        "backward comes. All but attention: each layer keeps its input and what attention gave. "
        f"Full: each layer keeps its input alone, and runs its forward again. {most}",
    )  # fmt: skip
    left, unit, tall, floor = 152, 51, 30, 10
    for name, (kept, again) in KEPT.items():
        floor += tall * peak(kept) + 24
        canvas.heading(16, floor - 26, name, size=15)
        canvas.note(16, floor - 2, f"at most {peak(kept):.1f}")
        canvas.note(16, floor + 16, "layers' worth")
        x = left
        for words, long, held in moments(kept, again):
            y = floor
            for layer, share in held:
                y -= tall * share
                canvas.rect(x, y, unit * long, tall * share, KINDS["A"], radius=0, line=1 if share > 0.2 else 0.5)
                if tall * share > 14:
                    canvas.text(x + unit * long / 2, y + tall * share / 2, layer, size=11, fill=ink(KINDS["A"]))
            canvas.rect(x, floor + 6, unit * long, 26, AGAIN if words.endswith("again") else TIMELINE["compute"])
            canvas.text(x + unit * long / 2, floor + 19, words.removesuffix(" again"), size=11)
            x += unit * long
        floor += 44
    legend = {"activations, by layer": KINDS["A"], "compute": TIMELINE["compute"], "computed again": AGAIN}
    for number, (words, colour) in enumerate(legend.items()):
        canvas.rect(left + 180 * number, 564, 16, 16, colour)
        canvas.text(left + 24 + 180 * number, 572, words, size=12.5, anchor="start")
    key = "Schematic: f4 is the forward of layer 4, b4 its backward. The notebook measures."
    canvas.note(16, 596, key)
    return canvas.drawing()


def peak(kept: float) -> float:
    """Return the peak in layers' worth: all layers that wait, plus the rest of the one whose backward runs."""
    return LAYERS * kept + (1 - kept)


def moments(kept: float, again: float) -> list[tuple[str, float, list[tuple[int, float]]]]:
    """Return [(what is computed, how long, [(layer, share of its activations that is held)])], in order."""
    layers = range(1, LAYERS + 1)
    found = [(f"f{last}", 1.0, [(layer, kept) for layer in range(1, last + 1)]) for last in layers]
    for last in reversed(layers):
        waiting = [(layer, kept) for layer in range(1, last)]
        if again:
            found.append((f"f{last} again", again, [*waiting, (last, 1.0)]))
        found.append((f"b{last}", 2.0, [*waiting, (last, 1.0)]))
    return found


TIERS = {
    "GPU memory": ["some 100 GB,", "thousands of GB/s"],
    "host memory": ["some 1000 GB, tens of", "GB/s to the GPU"],
    "disk": ["some 10 000 GB,", "a few GB/s"],
}
# The bytes per parameter on each tier, in mixed precision, and what passes between it and the next tier in a step.
PLACES = {
    "all on the GPU": [{"P": 2, "G": 2, "S": 12, "A": 0}, {}, {}],
    'where="cpu"': [{"P": 2, "G": 2, "A": 0}, {"S": 12}, {}],
    'where="folder"': [{"P": 2, "G": 2, "A": 0}, {"S": 0}, {"S": 12}],
}
TRAVELS = {'where="cpu"': [("G", "P", 2)], 'where="folder"': [("G", "P", 2), ("S", "S", 12)]}


def tiers() -> Drawing:
    canvas = Sketch(
        990, 366, "What lives on which tier, and what travels in a step",
        "In mixed precision, bytes per parameter. All on the GPU: parameters 2, gradients 2, masters and optimizer "
        "state 12, and activations. Offloaded to host memory: the 12 live there; in a step the gradients go down, 2 "
        "bytes, and the parameters come back, 2 bytes. Offloaded to a folder: the 12 lie in files; in a step they are "
        "read and written besides, 12 and 12 bytes, and host memory has three parameters' state at a time.",
    )  # fmt: skip
    left, wide, unit, high, step = 200, 266, 12, 44, 108
    for row, (name, words) in enumerate(TIERS.items()):
        y = 52 + step * row
        canvas.rect(8, y - 8, 974, high + 16, fill=SOFT, stroke="none", radius=8)
        canvas.heading(20, y + 3, name)
        canvas.lines(20, y + 21, words, size=12, anchor="start", fill=MUTED)
    for column, (name, held) in enumerate(PLACES.items()):
        x = left + wide * column
        canvas.heading(x, 22, name, size=15)
        for row, kinds in enumerate(held):
            at = x
            for kind, size in kinds.items():
                long = unit * size or 36
                words = f"S  {size} bytes" if size == 12 else kind
                canvas.box(at, 52 + step * row, long, high, words, KINDS[kind])
                at += long + 4
        for row, (down, up, size) in enumerate(TRAVELS.get(name, [])):
            top, bottom = 52 + step * row + high + 4, 52 + step * (row + 1) - 4
            for kind, at, ends in ((down, x + 46, (top, bottom)), (up, x + 14, (bottom, top))):
                canvas.arrow((at, ends[0]), (at, ends[1]), stroke=KINDS["comm"])
                canvas.text(at + 6, (top + bottom) / 2, kind, size=11.5, anchor="start")
            words = f"{size} + {size} bytes"
            canvas.note(x + 78, (top + bottom) / 2, words)
    key = "Bytes per parameter, and per step. S: float32 masters and AdamW's two moments; small S: of three parameters."
    canvas.note(20, 346, key)
    return canvas.drawing()
