"""The README's first picture: four ways to train one model, each with rank 0's memory over a step, and its loss.

python -m tools.front_images     trains, and writes the recordings to tools/front.json (make images draws from that)
"""

import json
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from labs.data import Batches, corpus
from labs.kit.drawing.palette import KINDS, MUTED, NAMES
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import width_of
from labs.kit.launch import run
from labs.kit.training import strategies
from labs.model import GPT, PRESETS
from tools.sketch import Sketch

SEEN = Path(__file__).with_name("front.json")
CONFIG = replace(PRESETS["tiny"], depth=8, kv_heads=4)
SEQUENCES, STEPS, WATCHED, BINS = 12, 30, 3, 100
WAYS = {
    "DDP": ("the batch is split", strategies.ROWS["ddp-overlapped"]),
    "FSDP": ("the state is split", strategies.ROWS["fsdp"]),
    "Tensor parallel": (
        "every matrix is split",
        replace(strategies.ROWS["tp-sp"], axes=lambda ranks: {"tp": ranks}),
    ),
    "Pipeline": ("the layers are split", strategies.ROWS["pp-1f1b"]),
}


def batches(parts: int, steps: int) -> list:
    loaders = [Batches(corpus().tokens, SEQUENCES, CONFIG.context, 0, part, parts) for part in range(parts)]
    return [[loader[step] for step in range(steps)] for loader in loaders]


def highest(series: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return BINS moments in order of time: each is the one in its interval at which most was held."""
    edges = [len(series) * n // BINS for n in range(BINS + 1)]
    return [max(series[a : max(b, a + 1)], key=lambda held: sum(held.values())) for a, b in pairwise(edges)]


def record() -> dict:
    seen = {}
    for name, (_, way) in WAYS.items():
        parts = way.parts(4)
        trained = run(strategies.train, way, partial(GPT, CONFIG), batches(parts, STEPS), ranks=4, device="cpu")
        losses = [losses[-1] for losses, _ in trained if losses]
        held = run(
            strategies.train, way, partial(GPT, CONFIG), batches(parts, WATCHED), ranks=4, device="cpu", record="memory"
        ).recording
        last = held.step_spans(0)[-1]
        inside = [kinds for moment, kinds in held.memory[0] if last.start <= moment <= last.end]
        seen[name] = {
            "loss": sum(losses) / len(losses),
            "kB": {kind: [round(kinds.get(kind, 0) / 1000) for kinds in highest(inside)] for kind in KINDS},
        }
    return seen


def totals(held: dict[str, list[int]]) -> list[int]:
    return [sum(kinds) for kinds in zip(*held.values(), strict=True)]


def front() -> Drawing:
    seen = json.loads(SEEN.read_text(encoding="utf-8"))
    most = max(max(totals(each["kB"])) for each in seen.values())
    told = "; ".join(f"{name}: loss {each['loss']:.4f}" for name, each in seen.items())
    canvas = Sketch(
        960, 330, "One model on four ranks, trained in four ways",
        f"Recorded. What rank 0 holds over one step, by kind, on one scale, and the loss after {STEPS} steps. {told}.",
    )  # fmt: skip
    wide, high, base = 204, 180, 262
    for number, (name, each) in enumerate(seen.items()):
        left, peak = 24 + 232 * number, max(totals(each["kB"]))
        canvas.heading(left, 24, name, size=15)
        canvas.text(left, 46, WAYS[name][0], anchor="start", fill=MUTED)
        below = [0.0] * BINS
        for kind, fill in KINDS.items():
            above = [low + more for low, more in zip(below, each["kB"][kind], strict=True)]
            at = [left + wide * n / (BINS - 1) for n in range(BINS)]
            upper = [(x, base - high * y / most) for x, y in zip(at, above, strict=True)]
            lower = [(x, base - high * y / most) for x, y in zip(at, below, strict=True)]
            canvas.area(*upper, *reversed(lower), fill=fill, stroke="none")
            below = above
        canvas.line((left, base), (left + wide, base))
        canvas.text(left, base - high * peak / most - 12, f"at most {peak / 1000:.1f} MB", size=12.5, anchor="start")
        canvas.text(left, base + 18, f"loss after {STEPS} steps: {each['loss']:.4f}", anchor="start", weight="bold")
    x = 24
    for kind, fill in KINDS.items():
        canvas.rect(x, 300, 14, 14, fill=fill, radius=0)
        canvas.text(x + 20, 307, NAMES[kind], size=12, anchor="start", fill=MUTED)
        x += 44 + width_of(NAMES[kind], 12)
    canvas.text(936, 307, "one step, from left to right", size=12, anchor="end", fill=MUTED)
    return canvas.drawing()


if __name__ == "__main__":
    SEEN.write_text(json.dumps(record()) + "\n", encoding="utf-8")
