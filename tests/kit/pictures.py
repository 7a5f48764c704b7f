"""Pictures that several tests look at, and helpers to look at them."""

import importlib
import itertools
import xml.etree.ElementTree as xml
from types import SimpleNamespace as Fake
from unittest.mock import patch

from matplotlib import font_manager, ft2font
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from tools import images

SVG = "{http://www.w3.org/2000/svg}"
RING = images.ring(4)


def called(rank, op, step, start, end, waited):
    """Return a collective that the rank waited for up to its end."""
    times = {"start": start, "end": end, "waited": waited, "waits": ((end - waited, end),)}
    return Fake(rank=rank, op=op, step=step, issuer="ddp.py:57 ready", **times)


def recording(ranks=2, steps=2, late=0.0):
    """Return labs.kit.record's recording of a small job; `late` delays the end of each collective."""
    spans, events, memory = [], [], []
    for rank, step in itertools.product(range(ranks), range(steps)):
        begin = step * 0.1
        names = {"step": (0, 0.1), "forward": (0, 0.03), "backward": (0.03, 0.08), "optimizer": (0.08, 0.1)}
        spans += [Fake(rank=rank, name=n, start=begin + a, end=begin + b) for n, (a, b) in names.items()]
        events.append(called(rank, "all_reduce", step, begin + 0.05, begin + 0.075 + late, waited=0.01 * rank))
    for _ in range(ranks):
        memory.append([(t / (100 + late), {"P": 2**20, "A": 2**19 * min(t, 20 - t)}) for t in range(21)])
    window = lambda rank, step: (step * 0.1, (step + 1) * 0.1)  # noqa: E731
    return Fake(
        kind="memory",
        ranks=ranks,
        seen=range(ranks),
        steps=steps,
        spans=spans,
        events=events,
        memory=memory,
        window=window,
    )


def busy(ranks=2):
    """Return a recording of one step with overlapping collectives: two gathers, one of them long, and eight
    reductions.
    """
    spans, events = [], []
    for rank in range(ranks):
        for name, start, end in (("step", 0, 1), ("forward", 0, 0.3), ("backward", 0.3, 0.98), ("sync", 0.98, 1)):
            spans.append(Fake(rank=rank, name=name, start=start, end=end))
        calls = [("all_gather", 0.0, 0.2), ("all_gather", 0.05, 0.5), ("barrier", 0.6, 0.61)]
        calls += [("reduce_scatter", 0.3 + 0.01 * n, 0.9 + 0.01 * n) for n in range(rank * 7)]
        calls += [("recv", 0.92, 0.95), ("send", 0.93, 0.96)]
        events += [called(rank, op, 0, b, e, waited=0.01) for op, b, e in calls]
    return Fake(
        kind="communication",
        ranks=ranks,
        seen=range(ranks),
        spans=spans,
        events=events,
        memory=[],
        window=lambda rank, step: (0, 1),
    )


def less(ranks=1, share=0.5):
    """Return a recording of memory that holds `share` of what `recording` does."""
    whole = recording(ranks)
    whole.memory = [
        [(t, {kind: share * held for kind, held in now.items()}) for t, now in each] for each in whole.memory
    ]
    return whole


def boxes(root):
    """Yield (left, top, right, bottom, words) of each text, with the metrics of DejaVu Sans."""
    fonts = {
        weight: ft2font.FT2Font(font_manager.findfont(font_manager.FontProperties(family="DejaVu Sans", weight=weight)))
        for weight in ("normal", "bold")
    }
    for text in root.iter(f"{SVG}text"):
        size, words = float(text.get("font-size")), text.text
        font = fonts[text.get("font-weight") or "normal"]
        font.set_size(size, 72)
        font.set_text(words)
        width = font.get_width_height()[0] / 64
        left = float(text.get("x")) - {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")] * width
        baseline = float(text.get("y"))
        yield left, baseline - 0.75 * size, left + width, baseline + 0.2 * size, words


def texts(drawing):
    return [text.text for text in xml.fromstring(drawing.svg).iter(f"{SVG}text")]


def require_legible(drawing):
    """Check that no word leaves the drawing, or overlaps another."""
    root = xml.fromstring(drawing.svg)
    placed, (width, height) = list(boxes(root)), (float(root.get(side)) for side in ("width", "height"))
    for left, top, right, bottom, words in placed:
        assert left >= 4 and top >= 2 and right <= width - 4 and bottom <= height - 2, f"{words!r} leaves the card"
    for (l1, t1, r1, b1, one), (l2, t2, r2, b2, other) in itertools.combinations(placed, 2):
        assert min(r1, r2) <= max(l1, l2) or min(b1, b2) <= max(t1, t2), f"{one!r} runs into {other!r}"


def words_of(canvas):
    """Return (words, box in pixels of the file, size in pixels of the page) of each visible text."""
    agg = FigureCanvasAgg(canvas)
    agg.draw()
    sides = [(axes.xaxis, axes.get_xlim()) for axes in canvas.axes] + [(a.yaxis, a.get_ylim()) for a in canvas.axes]
    ticks = [(tick, sorted(limits)) for axis, limits in sides for tick in axis.get_major_ticks()]
    beyond = [tick.label1 for tick, (low, top) in ticks if not low <= tick.get_loc() <= top]  # kept, but not drawn
    found = [t for t in canvas.findobj(Text) if t.get_text().strip() and t.get_visible() and t not in beyond]
    return [(t.get_text(), t.get_window_extent(agg.get_renderer()), t.get_fontsize() * 96 / 72) for t in found]


def drawn(figure, *given, **options):
    """Draw a figure of measurements, and return matplotlib's canvas behind it, and the picture."""
    module, kept = importlib.import_module(figure.__module__), []
    finish = module.finish
    with patch.object(module, "finish", lambda canvas, *words: kept.append(canvas) or finish(canvas, *words)):
        picture = figure(*given, **options)
    return kept[0], picture
