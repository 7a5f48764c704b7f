"""The tensor-parallel explorer's picture: each rank's slice of each matrix, the collectives, and the bytes of a rank.

    picture(**BEGIN)      the GPT's matrices in the order of the forward; the bytes that rank 0 sends and holds

`labs.kit.play.tensor_parallel` shows this picture below its controls.  All numbers in the picture come from labs.cost.
The shape of the model follows from `width` as in Llama 3: heads of 128, at most 8 heads of keys and values, and an MLP
of 3.5 × width.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from labs import cost
from labs.cost.tensor_parallel import Call
from labs.kit.drawing.gpu_memory_bars import draw, legend, size
from labs.kit.drawing.palette import COLLECTIVES, KINDS, MUTED, RANKS, SOFT, ink
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas, width_of
from labs.model import Config

HEAD_SIZE, KV_HEADS, DEPTH = 128, 8, 32
WIDE, HIGH, APART, BADGE, TOP, LEFT = 58, 64, 8, 22, 78, 92  # pixels: a matrix, the gap, a collective, margins
LONG = 420  # pixels: the longest bar
OPS = {"all_reduce": KINDS["comm"], "all_gather": COLLECTIVES["all_gather"]}
OPS |= {"reduce_scatter": COLLECTIVES["reduce_scatter"]}
LETTERS = {"all_reduce": "R", "all_gather": "G", "reduce_scatter": "S"}
KEY = "As in x @ W: inputs down, outputs across. A number in a matrix: the rank that has this part of it."

# CONTROLS has the values of each control, by its name: a sequence becomes a slider, a mapping becomes a menu.
# BEGIN has the control's first value.
CONTROLS: dict[str, Sequence | Mapping] = {
    "ranks": (1, 2, 4, 8, 16, 32),
    "width": (512, 1024, 2048, 4096, 8192, 16384),
    "sequence": tuple(2**k for k in range(9, 18)),
    "vocabulary": (256, 32_000, 50_257, 128_256),
    "x": {"whole on every rank": False, "in shards along the sequence": True},
}
BEGIN = {"ranks": 4, "width": 4096, "sequence": 8192, "vocabulary": 128_256, "x": "whole on every rank"}


@dataclass(frozen=True)
class Matrix:
    """A weight matrix of the model, split over the ranks.

    pieces: the number of output features of each rank, or of input features if the matrix is split by inputs.
    by_outputs: whether the matrix is split by its outputs.
    copies: the number of neighbouring ranks that hold the same piece.
    """

    name: str
    pieces: Sequence[int]
    by_outputs: bool = True
    copies: int = 1


def picture(ranks: int, width: int, sequence: int, vocabulary: int, x: bool) -> Drawing:
    """Draw the split matrices, the collectives and the bytes of a tensor-parallel GPT at these values of CONTROLS.

    x: whether the activations x between split layers are sharded along the sequence.
    """
    heads = width // HEAD_SIZE
    config = Config(vocabulary, width, DEPTH, heads, min(KV_HEADS, heads), 7 * width // 2, context=sequence)
    sizes = f"{DEPTH} layers of width {width:,}, {sequence:,} tokens, a vocabulary of {vocabulary:,}"
    title = f"{sizes}, in bfloat16 with masters"
    job = cost.Job(config, 1, ranks, precision="mixed")
    try:
        calls, split = [call for call in cost.tp_calls(job, x) if call.sent], cost.tp(job, x)
    except ValueError as refused:
        return sentence(title, str(refused))
    held = {"one process": vars(cost.tp(replace(job, ranks=1)).held)}
    if ranks > 1:
        held[f"rank 0 of {ranks}"] = vars(split.held)
    return draw_model(title, matrices(config, ranks), calls, held, split.sent)


def sentence(title: str, words: str) -> Drawing:
    canvas = Canvas(LEFT + 800, 80, title, words)
    canvas.text(16, 22, title, anchor="start", weight="bold")
    canvas.text(16, 50, words, anchor="start")
    return canvas.drawing(f"{title}\n{words}")


def matrices(config: Config, ranks: int) -> list[Matrix]:
    shares = [cost.share(config, ranks, rank) for rank in range(ranks)]
    pieces = {name: [getattr(own, name) for own in shares] for name in ("vocab", "heads", "kv_heads", "hidden")}
    heads, hidden, copies = pieces["heads"], pieces["hidden"], shares[0].copies
    keys = [Matrix(name, pieces["kv_heads"], copies=copies) for name in "kv"]
    attention = [Matrix("q", heads), *keys, Matrix("o", heads, False)]
    mlp = [Matrix("gate", hidden), Matrix("up", hidden), Matrix("down", hidden, False)]
    return [Matrix("embedding", pieces["vocab"], False), *attention, *mlp, Matrix("head", pieces["vocab"])]


# ---- parts -----------------------------------------------------------------------------------------------


def draw_model(
    title: str, found: list[Matrix], calls: list[Call], held: Mapping[str, Mapping[str, int]], sent: int
) -> Drawing:
    lines = [
        f"{part}: {phase} {', '.join(words)}"
        for part, phases in spoken(calls).items()
        for phase, words in phases.items()
    ]
    lines += [f"{name} holds at most {size(kinds['peak'])}" for name, kinds in held.items()]
    lines += [f"rank 0 sends in a step: {size(sent) if sent else 'nothing'}"]
    canvas = Canvas(LEFT + 800, 0, title, "; ".join(lines) + ".")
    canvas.text(16, 22, title, anchor="start", weight="bold")
    strip(canvas, found, calls)
    y = table(canvas, TOP + HIGH + 100, calls, sent)
    left, scale = LEFT + 20, LONG / (1.05 * max(sum(of_kinds(kinds).values()) for kinds in held.values()))
    for name, kinds in held.items():
        canvas.text(left - 10, y + 12, name, anchor="end")
        end = draw(canvas, left, y, of_kinds(kinds), kinds["peak"], scale)
        canvas.text(end + 8, y + 12, size(kinds["peak"]), anchor="start")
        y += 36
    legend(canvas, left, y + 12, list(of_kinds(kinds)))
    canvas.height = y + 34
    return canvas.drawing("\n".join([title, *lines]))


def of_kinds(held: Mapping[str, int]) -> dict[str, int]:
    return {kind: held[kind] for kind in KINDS if held[kind] is not None}


def strip(canvas: Canvas, found: list[Matrix], calls: list[Call]) -> None:
    """Draw the matrices in a row, with the collectives between them: the forward's above, the backward's below."""
    enter, leave = ({call.phase: call.op for call in calls if call.part == part} for part in ("head", "embedding"))
    before, behind = {"q", "gate", "head"}, {"embedding", "o", "down"}
    x, mid = LEFT, {"forward": TOP + HIGH / 2 - BADGE, "backward": TOP + HIGH / 2}
    for phase, y in mid.items():
        canvas.text(LEFT - 10, y + BADGE / 2, phase, size=12, anchor="end", fill=MUTED)
    edges = {}
    for matrix in found:
        if matrix.name in before:
            x = border(canvas, x, mid, enter)
        edges[matrix.name] = x
        weight(canvas, x, matrix)
        x += WIDE + APART
        if matrix.name in behind:
            x = border(canvas, x, mid, leave)
    first, last = edges["q"] - BADGE - APART, edges["head"] - BADGE - 2 * APART
    canvas.line((first, TOP - 14), (first, TOP - 20), (last, TOP - 20), (last, TOP - 14), stroke=MUTED)
    canvas.text((first + last) / 2, TOP - 30, f"a layer, × {DEPTH}", size=12, fill=MUTED)
    key, y = LEFT, TOP + HIGH + 40
    for op in dict.fromkeys([*enter.values(), *leave.values()]):
        key = badge(canvas, key, y - BADGE / 2, op) + 6
        canvas.text(key, y, op.replace("_", "-"), size=12, anchor="start", fill=MUTED)
        key += width_of(op, 12) + 18
    canvas.text(LEFT, y + 26, KEY, size=12, anchor="start", fill=MUTED)


def border(canvas: Canvas, x: float, rows: Mapping[str, float], does: Mapping[str, str]) -> float:
    for phase, y in rows.items():
        badge(canvas, x, y, does.get(phase, ""))
    return x + BADGE + APART


def badge(canvas: Canvas, x: float, y: float, op: str) -> float:
    fill = OPS.get(op, SOFT)
    canvas.rect(x, y, BADGE, BADGE, fill=fill, radius=2)
    canvas.text(x + BADGE / 2, y + BADGE / 2, LETTERS.get(op, "–"), size=12, weight="bold", fill=ink(fill))
    return x + BADGE


def weight(canvas: Canvas, x: float, matrix: Matrix) -> None:
    canvas.text(x + WIDE / 2, TOP + HIGH + 12, matrix.name, size=12.5)
    pieces = matrix.pieces[:: matrix.copies]
    ends = [*accumulate(pieces, initial=0)]
    long = WIDE if matrix.by_outputs else HIGH
    for number, piece in enumerate(pieces):
        start, extent = long * ends[number] / ends[-1], long * piece / ends[-1]
        box = (x + start, TOP, extent, HIGH) if matrix.by_outputs else (x, TOP + start, WIDE, extent)
        canvas.rect(*box, fill=RANKS[number * matrix.copies % len(RANKS)], radius=0)
        first = number * matrix.copies
        label = str(first) if matrix.copies == 1 else f"{first}–{first + matrix.copies - 1}"
        if box[2] >= width_of(label, 10) and box[3] >= 10:
            canvas.text(box[0] + box[2] / 2, box[1] + box[3] / 2, label, size=10)


def table(canvas: Canvas, y: float, calls: Iterable[Call], sent: int) -> float:
    """Draw the bytes that rank 0 sends for each part of the model; return the y at which the table ends."""
    lefts = {"forward": LEFT + 20, "backward": LEFT + 340}
    canvas.text(LEFT + 10, y, "rank 0 sends", size=12, anchor="end", fill=MUTED)
    for phase, x in lefts.items():
        canvas.text(x, y, phase, size=12, anchor="start", fill=MUTED)
    for part, phases in spoken(calls).items():
        canvas.text(LEFT + 10, y + 21, part, size=12.5, anchor="end")
        for phase, x in lefts.items():
            canvas.lines(x, y + 21, phases.get(phase, ["–"]), size=12.5, leading=1.6, anchor="start")
        y += 20 * max(map(len, phases.values()))
    canvas.text(LEFT + 10, y + 21, "a step", size=12.5, anchor="end", weight="bold")
    canvas.text(LEFT + 20, y + 21, size(sent) if sent else "nothing", anchor="start", weight="bold")
    return y + 50


def spoken(calls: Iterable[Call]) -> dict[str, dict[str, list[str]]]:
    """Return the collectives in words, as {part of the model: {phase: lines}}.

    Collectives of one size share a line: "2 all-gathers and 2 reduce-scatters of 101 MB".
    """
    alike: dict[tuple[str, str, int], list[str]] = {}
    for call in calls:
        name = f"{call.times} {call.op.replace('_', '-')}{'s' * (call.times > 1)}"
        alike.setdefault((call.part, call.phase, call.sent), []).append(name)
    found: dict[str, dict[str, list[str]]] = {}
    for (part, phase, sent), names in alike.items():
        found.setdefault(part, {}).setdefault(phase, []).append(f"{' and '.join(names)} of {size(sent)}")
    return found
