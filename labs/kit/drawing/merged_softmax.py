"""A drawing of two parts of a softmax, and of the weights by which they are merged: one query and a few keys.

merged_softmax([2.0, 1.0, 3.0, 0.0], [10.0, 20.0, 30.0, 40.0], cut=2)
"""

import math
from collections.abc import Sequence

from labs.kit.drawing.palette import INK, MUTED, RANKS
from labs.kit.drawing.picture import Drawing
from labs.kit.drawing.svg import Canvas

LEFT, TOP, HIGH, WIDE, GAP, ROW = 24, 62, 130, 46, 14, 30  # pixels


def merged_softmax(scores: Sequence[float], values: Sequence[float], cut: int) -> Drawing:
    """Draw exp(score) of each key as a bar, the sum of each part, and the output as a mean of the parts' outputs.

    cut: the number of keys in the first part.
    """
    sizes = [math.exp(score) for score in scores]
    parts = [range(cut), range(cut, len(scores))]
    sums = [sum(sizes[key] for key in part) for part in parts]
    outputs = [sum(sizes[key] * values[key] for key in part) / total for part, total in zip(parts, sums, strict=True)]
    shares = [each / sum(sums) for each in sums]
    output = sum(share * each for share, each in zip(shares, outputs, strict=True))
    sentences = [
        f"part {name}: sum {total:.1f}, l = {math.log(total):.2f}, o = {each:.2f}"
        for name, total, each in zip("ab", sums, outputs, strict=True)
    ]
    terms = " + ".join(f"{share:.2f} × {each:.2f}" for share, each in zip(shares, outputs, strict=True))
    words = f"{'; '.join(sentences)}. Merged: {terms} = {output:.2f}."
    canvas = Canvas(660, TOP + HIGH + 128, "Two parts of a softmax, merged", words)
    canvas.text(LEFT, 18, "exp(s) of each key, for one query", 13, "start", "bold")
    floor = TOP + HIGH
    for key, size in enumerate(sizes):
        part = key >= cut
        x, tall = LEFT + (WIDE + GAP) * key + 2 * GAP * part, HIGH * size / max(sizes)
        canvas.rect(x, floor - tall, WIDE, tall, RANKS[part], INK, 0)
        canvas.text(x + WIDE / 2, floor - tall - 11, f"{size:.1f}", 12.5)
        canvas.text(x + WIDE / 2, floor + 14, f"v {values[key]:g}", 12.5)
    canvas.line((LEFT - 6, floor), (x + WIDE + 6, floor), stroke=INK)
    aside = x + WIDE + 40
    for number, sentence in enumerate(sentences):
        canvas.rect(aside, TOP + 12 + ROW * number, 18, 16, RANKS[number], INK, 0)
        canvas.text(aside + 26, TOP + 20 + ROW * number, sentence, 13, "start")
    across, level = 560, floor + 66
    canvas.text(
        LEFT, level - 18, "each part's weight, exp(its l) over the sum of both, times its o", 13, "start", "bold"
    )
    for number, (share, each) in enumerate(zip(shares, outputs, strict=True)):
        x = LEFT + across * sum(shares[:number])
        canvas.rect(x, level, across * share, 28, RANKS[number], INK, 0)
        canvas.text(x + across * share / 2, level + 14, f"{share:.2f} × {each:.2f}", 13)
    canvas.text(LEFT, level + 46, f"both: o = {terms} = {output:.2f}", 13, "start", fill=MUTED)
    return canvas.drawing()
