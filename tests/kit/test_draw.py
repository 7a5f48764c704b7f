"""Figures say what they were given, look the same each time, and can be read.

The reference: the numbers handed in; WCAG 2.2 for contrast; Machado, Oliveira and Fernandes (2009), "A
Physiologically-based Model for Simulation of Color Vision Deficiency", for what colour-blind readers see; and
the metrics of DejaVu Sans, the widest of the usual fonts, for whether words fit.
"""

import base64
import importlib
import itertools
import struct
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from functools import partial
from types import SimpleNamespace as Fake

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from matplotlib import font_manager, ft2font
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.text import Text

from labs import collectives, pp
from labs.dtensor import Partial, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.kit import draw
from labs.kit.drawing import palette, plans, timelines
from labs.kit.drawing.diagrams import sends
from labs.kit.drawing.figures import finish
from labs.kit.drawing.tables import short
from labs.kit.launch import run
from labs.model import GPT, PRESETS
from labs.tp import ColwiseParallel, LossParallel, conjugate, gpt_plan
from tools import images
from tools.notebooks import without_noise

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # or each rank imports matplotlib with it

SVG = "{http://www.w3.org/2000/svg}"
RING = images.ring(4)
TREE = [(k, r, r + 2**k, 0) for k in range(3) for r in range(2**k)]
DOUBLING = [(k, r, r ^ 2**k, 0) for k in range(3) for r in range(8)]
EVERYBODY = [(0, s, d, d) for s in range(5) for d in range(5) if s != d]
DRAWINGS = {
    "ring": lambda: draw.messages(RING, 4),
    "tree": lambda: draw.messages(TREE, 8),
    "doubling": lambda: draw.messages(DOUBLING, 8),
    "all to all": lambda: draw.messages(EVERYBODY, 5),
    "nothing": lambda: draw.messages([], 1),
    "step": lambda: draw.step(RING, 4, 3),
    "pieces": lambda: draw.pieces({"before": draw.own(4, 4), "after": [{r: {0, 1, 2, 3}} for r in range(4)]}),
    "mesh": lambda: draw.mesh({"data": 2, "tensor": 4}),
    "axis": lambda: draw.mesh({"data": 8}),
    "groups": lambda: draw.mesh({"data": 2, "tensor": 4}, along="data"),
    "groups of one axis": lambda: draw.mesh({"data": 3}, along="data"),
    "blocks": lambda: draw.blocks(Spec((7, 5), (2, 3), (Shard(0), Shard(1))), ("data", "tensor")),
    "summands": lambda: draw.blocks(Spec((12,), (4,), (Partial(),)), ("data",)),
    "empty blocks": lambda: draw.blocks(Spec((3, 4), (4,), (Shard(0),)), ("data",)),
    "plan": lambda: draw.plan(gpt_plan(PRESETS["small"], True), GPT(PRESETS["small"])),
    "plan without a weight": lambda: draw.plan({"loss": LossParallel(256)}, GPT(PRESETS["tiny"]), ranks=3),
    "chart": lambda: draw.chart({"ring": 0.0012, "recursive doubling": 0.0031}, "s", caption="8 ranks, 1 MB"),
    "stacked": lambda: draw.chart({"stage 0": {"P": 4, "G": 4, "S": 8}, "stage 3": {"P": 1, "G": 1, "S": 2}}),
    "wrong schedule": lambda: draw.schedule([[pp.F(0, 0), pp.B(0, 0), pp.F(0, 1)], [pp.F(1, 0), pp.F(1, 1)]]),
    "schedule without a forward": lambda: draw.schedule([[pp.F(0, 0), pp.B(0, 0)], [pp.B(1, 0)]]),
} | {picture.__name__: picture for picture in images.PICTURES}
DRAWINGS |= {f"{name} schedule": partial(draw.schedule, lists(4, 8)) for name, lists in pp.SCHEDULES.items()}


def called(rank, op, step, start, end, waited):
    """A collective that the rank waited for up to its end."""
    return Fake(rank=rank, op=op, step=step, start=start, end=end, waited=waited, waits=((end - waited, end),))


def recording(ranks=2, steps=2, late=0.0):
    """What labs.kit.record would say of a small job; `late` is how much later a collective ends."""
    spans, events, memory = [], [], []
    for rank, step in itertools.product(range(ranks), range(steps)):
        begin = step * 0.1
        names = {"step": (0, 0.1), "forward": (0, 0.03), "backward": (0.03, 0.08), "optimizer": (0.08, 0.1)}
        spans += [Fake(rank=rank, name=n, start=begin + a, end=begin + b) for n, (a, b) in names.items()]
        events.append(called(rank, "all_reduce", step, begin + 0.05, begin + 0.075 + late, waited=0.01 * rank))
    for _ in range(ranks):
        memory.append([(t / (100 + late), {"P": 2**20, "A": 2**19 * min(t, 20 - t)}) for t in range(21)])
    window = lambda rank, step: (step * 0.1, (step + 1) * 0.1)  # noqa: E731
    return Fake(kind="memory", ranks=ranks, steps=steps, spans=spans, events=events, memory=memory, window=window)


# ---- the ledger --------------------------------------------------------------------------------------------


def test_ledger_reads_like_this():
    ledger = draw.ledger(
        {
            "sent": (1_638_400, 1_638_400),
            "held A": (1000, 1030),
            "peak": (4096, 9000),
            "all-reduces": (3, 3, ""),
            "step": (0.010, 0.01234, "s"),
            "temporary": (None, 5),
        }
    )
    assert repr(ledger).splitlines() == [
        "                          predicted                measured  verdict",
        "───────────  ──────────────────────  ──────────────────────  ──────────────────",
        "sent         1,638,400 B (1.56 MiB)  1,638,400 B (1.56 MiB)  = exact",
        "held A                      1,000 B      1,030 B (1.01 KiB)  ≈ within 5 %",
        "peak             4,096 B (4.00 KiB)      9,000 B (8.79 KiB)  ≠ differs (2.20 ×)",
        "all-reduces                       3                       3  = exact",
        "temporary                         –                     5 B  –",
        "step: predicted 10.00 ms, measured 12.34 ms",
    ]
    assert not ledger.agrees


@pytest.mark.parametrize(
    ("predicted", "measured", "verdict", "agrees"),
    [
        (100, 100, "= exact", True),
        (1_000_000, 1_000_001, "≈ within 0.1 %", True),
        (100, 101, "≈ within 1 %", True),
        (100, 90, "≈ within 10 %", True),
        (100, 89, "≠ differs (0.89 ×)", False),
        (100, 200, "≠ differs (2.00 ×)", False),
        (0, 0, "= exact", True),
        (0, 1, "≠ differs", False),
        (1, float("nan"), "≠ differs (nan ×)", False),
        ("(2, 3)", "(2, 3)", "= exact", True),
        ("(2, 3)", "(3, 2)", "≠ differs", False),
        (None, 7, "–", True),
        (7, None, "–", True),
    ],
)
def test_verdicts(predicted, measured, verdict, agrees):
    ledger = draw.ledger({"row": (predicted, measured, "")})
    assert ledger.verdict(ledger.rows[0]) == verdict
    assert ledger.agrees == agrees


def test_ledger_never_claims_more_than_its_tolerance():
    ledger = draw.ledger({"row": (1000, 1025)}, within=0.03)
    assert ledger.verdict(ledger.rows[0]) == "≈ within 3 %"
    assert not draw.ledger({"row": (1000, 1031)}, within=0.03).agrees


def test_ledger_of_two_sides():
    ledger = draw.ledger([("sent", 100, 100, 200), ("steps", 5, 5, 5, ""), ("held", 7, 7)])
    lines = repr(ledger).splitlines()
    assert lines[0].split() == ["predicted", "ours", "native", "verdict"]
    assert "ours = exact; native ≠ differs (2.00 ×)" in lines[2]
    assert lines[3].endswith("= exact") and "ours" not in lines[3]
    assert lines[4].split()[-2:] == ["=", "exact"] or "–" in lines[4]
    assert not ledger.agrees


def test_times_leave_the_compared_part_alone():
    slow, quick = (
        repr(draw.ledger({"sent": (5, 5), "step": (None, seconds, "s"), "loss": (None, 3.1, "nats")}))
        for seconds in (12.5, 0.0001)
    )
    assert slow.splitlines()[:3] == quick.splitlines()[:3]
    assert slow.splitlines()[3:] == ["step: measured 12.50 s", "loss: measured 3.1000 nats"]
    assert quick.splitlines()[3] == "step: measured 100.00 µs"


def test_tables_in_html_have_scopes_and_no_colours():
    html = draw.ledger({"<sent>": (1, 1)}, caption="A & B")._repr_mimebundle_()["text/html"]
    root = xml.fromstring(f"<div>{html}</div>")
    assert root.find("table/caption").text == "A & B"
    assert {th.get("scope") for th in root.find("table/thead").iter("th")} == {"col"}
    assert [th.text for th in root.find("table/tbody").iter("th")] == ["<sent>"]
    assert root.find("table/tbody/tr/th").get("scope") == "row"
    assert "color" not in html and "background" not in html, "the page's theme decides"


def test_table():
    table = draw.table([{"ranks": 2, "ok": True, "gap": 0.123456}, {"ranks": 4000, "ok": False, "gap": None}])
    assert repr(table).splitlines() == [
        "ranks  ok      gap",
        "─────  ───  ──────",
        "    2  yes  0.1235",
        "4,000  no        –",
    ]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: draw.table([]), "at least one row"),
        (lambda: draw.table([{"a": 1}, {"b": 1}]), r"row 1 has the columns \('b',\)"),
        (lambda: draw.ledger({"sent": (1,)}), "'sent' holds 1 values"),
        (lambda: draw.ledger({"sent": (1, 2, 3, 4, "B")}), "'sent' holds 4 values"),
        (lambda: draw.step(RING, 4, 7), "choose 0 to 6"),
        (lambda: draw.mesh({"a": 2, "b": 2, "c": 2}), "3 axes"),
        (lambda: draw.memory(recording(), step=0, names=("one",)), "1 names for 2 panels"),
        (lambda: draw.memory(Fake(kind="time", ranks=2, memory=[])), "'time' holds no memory"),
    ],
)
def test_wrong_input_is_told_in_a_sentence(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        wrong()


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1,024 B (1.00 KiB)"),
        (1.5, "1.5 B"),
        (2**50, f"{2**50:,} B (1,024.00 TiB)"),
    ],
)
def test_size(count, words):
    assert draw.size(count) == words


# ---- colours -----------------------------------------------------------------------------------------------

VISION = {  # severity 1.0, linear RGB: Machado et al. (2009), table 1
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "usual": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
}


def lab(colour, matrix):
    """CIE L*a*b* (D65) of "#RRGGBB" as seen through a colour vision matrix."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    seen = [min(1, max(0, sum(m * c for m, c in zip(row, linear, strict=True)))) for row in matrix]
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    xyz = [sum(m * c for m, c in zip(row, seen, strict=True)) for row in to_xyz]
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (v / white for v, white in zip(xyz, (0.9505, 1, 1.089), strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("colours", [palette.KINDS, palette.TIMELINE, palette.INSTRUCTIONS])
def test_colours_can_be_told_apart(vision, colours):
    seen = {name: lab(colour, VISION[vision]) for name, colour in colours.items()}
    for one, other in itertools.combinations(seen, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True)) ** 0.5
        assert distance > 15, f"{one} and {other} look alike to {vision} readers"  # 2.3 is just noticeable


def test_one_colour_each():
    assert set(palette.KINDS) == {"P", "G", "S", "A", "comm", "temporary"} == set(palette.NAMES)
    assert len(set(palette.KINDS.values())) == 6
    assert palette.TIMELINE["communication"] == palette.KINDS["comm"]


def test_words_stand_out_from_what_they_lie_on():
    fills = [
        *palette.KINDS.values(),
        *palette.TIMELINE.values(),
        *palette.COLLECTIVES.values(),
        *palette.RANKS,
        *palette.INSTRUCTIONS.values(),
        palette.PAPER,
        palette.SOFT,
    ]
    assert min(palette.contrast(palette.ink(fill), fill) for fill in fills) >= 4.5
    assert min(palette.contrast(palette.INK, tint) for tint in palette.RANKS) >= 4.5
    assert min(palette.contrast(words, palette.PAPER) for words in (palette.MUTED, palette.WRONG)) >= 4.5
    assert min(palette.contrast(colour, palette.PAPER) for colour in palette.SERIES[1:]) >= 3


# ---- drawings from data ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWINGS)
def test_same_data_same_bytes(name):
    one, other = DRAWINGS[name]()._repr_mimebundle_(), DRAWINGS[name]()._repr_mimebundle_()
    assert one == other
    assert set(one) == {"text/html", "text/plain"}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_an_image_with_alternative_text_that_shrinks(name):
    """JupyterLab shows neither image/svg+xml nor <svg> of a notebook that is not trusted: test_browser sees to that."""
    drawing = DRAWINGS[name]()
    image = xml.fromstring(drawing.html.replace('">', '"/>'))
    kind, data = image.get("src").split(",")
    assert kind == "data:image/svg+xml;base64" and base64.b64decode(data).decode() == drawing.svg
    root = xml.fromstring(drawing.svg)
    assert image.get("alt").startswith(root.find(f"{SVG}title").text.strip())
    assert image.get("alt").endswith(root.find(f"{SVG}desc").text.split()[-1])
    assert image.get("style") == "max-width:100%;height:auto"


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_say_what_they_show_and_stand_alone(name):
    drawing = DRAWINGS[name]()
    root = xml.fromstring(drawing.svg)
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text and root.find(f"{SVG}desc").text
    assert not [element for element in root.iter() if element.get("id") or element.get("href")]
    assert not list(root.iter(f"{SVG}style")) and not list(root.iter(f"{SVG}script"))
    assert "\n" in drawing.svg and drawing.text and str(drawing) == drawing.text


def boxes(root):
    """(left, top, right, bottom, words) of each text, with the metrics of DejaVu Sans."""
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


@pytest.mark.parametrize("name", DRAWINGS)
def test_words_fit_and_do_not_overlap(name):
    root = xml.fromstring(DRAWINGS[name]().svg)
    placed = list(boxes(root))
    width, height = float(root.get("width")), float(root.get("height"))
    for left, top, right, bottom, words in placed:
        assert left >= 4 and top >= 2 and right <= width - 4 and bottom <= height - 2, f"{words!r} leaves the card"
    for (l1, t1, r1, b1, one), (l2, t2, r2, b2, other) in itertools.combinations(placed, 2):
        assert min(r1, r2) <= max(l1, l2) or min(b1, b2) <= max(t1, t2), f"{one!r} runs into {other!r}"
    assert min(float(text.get("font-size")) for text in root.iter(f"{SVG}text")) >= 10


@pytest.mark.parametrize("name", [picture.__name__ for picture in images.PICTURES])
def test_images_are_up_to_date(name):
    kept = (images.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == DRAWINGS[name]().svg, "run `make images`"


def test_a_plan_tells_what_crosses_each_border():
    """The reference: the table at the head of labs.tp.conjugate, and labs.tp.shares for who has which heads."""
    lines = [line.split() for line in conjugate.__doc__.splitlines()]
    table = {words[0]: words[-2:] for words in lines if words and words[0] in plans.BORDERS and len(words) == 7}
    for name, (forward, backward) in plans.BORDERS.items():
        assert table[name] == [way.replace("-", "_") or "-" for way in (forward, backward)]
    assert len(table) == len(plans.BORDERS)
    whole, shards = (draw.plan(gpt_plan(PRESETS["small"], sequence), GPT(PRESETS["small"])) for sequence in (0, 1))
    assert "mlp.down: style RowwiseParallel; comes in features; goes out x, whole; sends forward all-reduce" in str(
        whole
    )
    assert "[kv]: style ColwiseParallel; comes in x, whole; goes out features; sends forward –; sends backward " in str(
        shards
    )
    assert str(shards).count("all-reduce of gradients") == 3 + 1 and str(whole).count("all-reduce of gradients") == 1
    assert [line.split(":")[0] for line in str(shards).splitlines()][1:4] == [
        "embed", "layers.*.attention_norm", "layers.*.attention",
    ]  # fmt: skip
    labels = [text.text for text in xml.fromstring(whole.svg).iter(f"{SVG}text")]
    assert labels.count("0 1") == labels.count("2 3") == 1 and labels.count("3") == 7
    alone = {"head": ColwiseParallel(output_layouts=Replicate())}
    told = "comes in x, whole; goes out x, whole; sends forward all-gather; sends backward all-reduce"
    assert told in str(draw.plan(alone, GPT(PRESETS["small"])))


def test_messages_draw_each_message_once():
    root = xml.fromstring(draw.messages(RING, 4).svg)
    arrows = [path for path in root.iter(f"{SVG}path") if path.get("fill") == "none"]
    assert len(arrows) == len(RING) == 24
    assert [text.text for text in root.iter(f"{SVG}text")].count("round 6") == 1
    assert "rank 3 sends piece 3 to rank 0" in root.find(f"{SVG}desc").text


def test_ring_ends_with_every_sum_on_every_rank():
    held = draw.own(4, 4)
    for number in range(6):
        held = draw.after(held, [message for message in RING if message[0] == number])
        if number == 2:
            assert all(held[rank][rank] == {0, 1, 2, 3} for rank in range(4)), "reduce-scatter: piece r on rank r"
    assert held == [{piece: {0, 1, 2, 3} for piece in range(4)}] * 4


def test_a_round_sends_what_was_there_before_it():
    held = draw.after([{0: {0}}, {}, {}], [(0, 0, 1, 0), (0, 1, 2, 0)])
    assert held == [{0: {0}}, {0: {0}}, {0: set()}]


@pytest.mark.parametrize(("messages", "ranks"), [(RING, 4), (TREE, 8), (DOUBLING, 8)], ids=["ring", "tree", "doubling"])
def test_rounds_are_found_again_in_a_recording(messages, ranks):
    """Every rank posts its receive before its send, then waits for both; ranks run at their own pace."""
    ready, events = defaultdict(float), []
    for number in range(1 + messages[-1][0]):
        now = [message for message in messages if message[0] == number]
        posted = {rank: ready[rank] + 0.01 * rank for rank in range(ranks)}
        done = defaultdict(float)
        for _, source, destination, _ in now:
            arrival = max(posted[source], posted[destination]) + 1
            size = {"bytes_in": 4096, "part": (0, 4096), "end": arrival}
            events.append(Fake(op="send", rank=source, peer=destination, start=posted[source] + 0.001, **size))
            events.append(Fake(op="recv", rank=destination, peer=source, start=posted[destination], **size))
            for rank in (source, destination):
                done[rank] = max(done[rank], arrival)
        for rank, moment in done.items():
            ready[rank] = moment
            for event in events:
                if event.rank == rank and event.start >= posted[rank] and event.end <= moment:
                    event.end = moment
    found = sends(Fake(ranks=ranks, events=events))
    assert sorted(found) == sorted((k, s, d, short(4096)) for k, s, d, _ in messages)


def test_a_real_ring_is_drawn_from_its_recording():
    job = run(ring_of_three, ranks=3, record="communication")
    expected = [(k, r, (r + 1) % 3, (r - 1 - k) % 3) for k in range(4) for r in range(3)]
    assert sorted(sends(job.recording)) == expected
    assert repr(draw.timeline(job.recording)) == f"Timeline(3 ranks, {len(job.recording.events)} events)"


def ring_of_three():
    collectives.all_reduce(torch.ones(30))


def test_copies_of_pieces_have_no_numbers():
    recording = run(ring_of_copies, ranks=3, record="communication").recording
    assert sorted(sends(recording)) == [(0, r, (r + 1) % 3, "40 B") for r in range(3)]


def ring_of_copies():
    rank = dist.get_rank()
    mine = torch.ones(30).tensor_split(3)[rank].clone()
    collectives.exchange(None, send=(mine, rank + 1), receive=(torch.empty(10), rank - 1))


def test_chart_is_to_scale():
    root = xml.fromstring(draw.chart({"a": 1.0, "b": {"P": 1.0, "S": 3.0}}, "s").svg)
    bars = {rect.get("fill"): float(rect.get("width")) for rect in root.iter(f"{SVG}rect") if rect.get("x")}
    assert bars[palette.KINDS["S"]] == 3 * bars[palette.KINDS["P"]] == 3 * bars[palette.KINDS["comm"]]
    assert draw.chart({"a": 0.0012, "bb": 0.5}, "s").text == "a   1.2 ms\nbb  500 ms"


# ---- figures of what was measured --------------------------------------------------------------------------

FIGURES = {
    "timeline": (lambda late: draw.timeline(recording(late=late)), "Timeline(2 ranks, 4 events)"),
    "one step": (lambda late: draw.timeline(recording(late=late), step=1), "Timeline(step 1, 2 ranks, 2 events)"),
    "memory": (lambda late: draw.memory(recording(late=late)), "Memory(2 ranks, by P G S A comm temporary)"),
    "bars": (
        lambda late: draw.bars({"predicted": {"P": 4, "peak": 9}, "measured": {"P": 4, "A": 5 + late, "peak": 9}}),
        "Bars(predicted, measured; by P A)",
    ),
    "curves": (
        lambda late: draw.curves({"one process": [5.5, 4.0], "DDP": [5.5, 4.0 + late]}, marks={"entropy": 3.1}),
        "Curves(one process, DDP; 2 steps)",
    ),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_beside_a_measured_figure_is_stable(name):
    figure, text = FIGURES[name]
    bundles = [figure(late)._repr_mimebundle_() for late in (0.0, 0.0123)]
    for data in bundles:
        assert set(data) == {"text/html", "text/plain"}
        assert data["text/plain"] == text
        image = xml.fromstring(data["text/html"].replace('">', '"/>'))
        assert image.get("alt") and image.get("style") == "max-width:100%;height:auto"
        width, height = struct.unpack(">II", base64.b64decode(image.get("src").split(",")[1])[16:24])
        shown = float(image.get("width")), float(image.get("height"))
        assert abs(width / 1.5 - shown[0]) <= 1 and abs(height / 1.5 - shown[1]) <= 1
    assert bundles[0] != bundles[1], "the numbers are in the picture"
    assert without_noise(bundles[0]) == without_noise(bundles[1]), "a notebook test compares no measured figure"
    assert figure(0.0)._repr_mimebundle_() == bundles[0]


def busy(ranks=2):
    """A recording of one step with collectives at once: two gathers, one of them long, and eight reductions."""
    spans, events = [], []
    for rank in range(ranks):
        for name, start, end in (("step", 0, 1), ("forward", 0, 0.3), ("backward", 0.3, 0.98), ("sync", 0.98, 1)):
            spans.append(Fake(rank=rank, name=name, start=start, end=end))
        calls = [("all_gather", 0.0, 0.2), ("all_gather", 0.05, 0.5), ("barrier", 0.6, 0.61)]
        calls += [("reduce_scatter", 0.3 + 0.01 * n, 0.9 + 0.01 * n) for n in range(rank * 7)]
        calls += [("recv", 0.92, 0.95), ("send", 0.93, 0.96)]
        events += [called(rank, op, 0, b, e, waited=0.01) for op, b, e in calls]
    return Fake(
        kind="communication", ranks=ranks, spans=spans, events=events, memory=[], window=lambda rank, step: (0, 1)
    )


def less(ranks=1, share=0.5):
    """A recording of memory that holds `share` of what `recording` does."""
    whole = recording(ranks)
    whole.memory = [
        [(t, {kind: share * held for kind, held in now.items()}) for t, now in each] for each in whole.memory
    ]
    return whole


@pytest.fixture
def canvas(monkeypatch):
    """Draws a figure and returns the canvas of matplotlib behind it."""

    def drawn(figure, *given, **options):
        module = importlib.import_module(figure.__module__)
        kept = []
        monkeypatch.setattr(module, "finish", lambda canvas, *words: kept.append(canvas) or finish(canvas, *words))
        figure(*given, **options)
        return kept[0]

    return drawn


def words_of(canvas):
    """(words, box in pixels of the file, size in pixels of the page) of each text that can be seen."""
    agg = FigureCanvasAgg(canvas)
    agg.draw()
    sides = [(axes.xaxis, axes.get_xlim()) for axes in canvas.axes] + [(a.yaxis, a.get_ylim()) for a in canvas.axes]
    ticks = [(tick, max(limits)) for axis, limits in sides for tick in axis.get_major_ticks()]
    beyond = [tick.label1 for tick, top in ticks if tick.get_loc() > top]  # matplotlib keeps these, and draws none
    found = [t for t in canvas.findobj(Text) if t.get_text().strip() and t.get_visible() and t not in beyond]
    return [(t.get_text(), t.get_window_extent(agg.get_renderer()), t.get_fontsize() * 96 / 72) for t in found]


NAMED = {"step": 1, "ranks": [0], "names": ("one device", "stage 3")}
CROWDED = {
    "timeline": (draw.timeline, [busy()], {"step": 0}),
    "two timelines": (draw.timeline, [busy(), busy(1)], {"step": 0, "names": ("ours", "native")}),
    "memory": (draw.memory, [recording(4)], {"step": 1}),
    "all of it": (draw.memory, [recording(1)], {}),
    "much less": (draw.memory, [recording(), less()], NAMED),
    "a little less": (draw.memory, [recording(), less(share=0.97)], NAMED),
    "more": (draw.memory, [recording(), less(share=1.4)], NAMED),
    "bars": (draw.bars, [{n: {"P": 9e6, "G": 1e5, "S": 2e6, "comm": 8e5, "peak": 1e7} for n in ("one", "two")}], {}),
}


@pytest.mark.parametrize("name", CROWDED)
def test_words_of_a_figure_can_be_read(canvas, name):
    """None is cut off, none runs into another, and none is under 9 px, in a small window with the sidebar open."""
    figure, given, options = CROWDED[name]
    drawn = canvas(figure, *given, **options)
    words = words_of(drawn)
    page, narrow = 96 * drawn.get_size_inches()[0], 572
    assert min(size for _, _, size in words) * narrow / page >= 9
    for word, box, _ in words:
        assert box.x0 >= 0 and box.y0 >= 0, f"{word!r} leaves the figure"
        assert box.x1 <= drawn.bbox.x1 and box.y1 <= drawn.bbox.y1, f"{word!r} leaves the figure"
    for (one, box, _), (other, place, _) in itertools.combinations(words, 2):
        assert not box.padded(-1).overlaps(place.padded(-1)), f"{one!r} runs into {other!r}"


def test_collectives_have_short_labels_and_lanes_of_their_own(canvas):
    drawn = canvas(draw.timeline, busy(1), step=0)
    words = {word: box for word, box, _ in words_of(drawn)}
    assert {"forward", "backward", "ag 1", "ag 2", "rank 0"} <= set(words)
    assert not {"all_gather", "sync"} & set(words), "short; and what has no room has no label"
    assert words["forward"].y0 > words["ag 1"].y1 > words["ag 1"].y0 > words["ag 2"].y1, "the band is above the lanes"
    assert "ag all-gather" in words and "rs reduce-scatter" not in words, "the legend tells kinds that are shown"


def test_collectives_of_a_step_are_counted_from_its_first(canvas):
    """Rank 0 is still in a barrier when the step of another rank has begun."""
    seen = busy(1)
    seen.events.insert(0, called(0, "all_gather", None, -0.1, 0.3, waited=0.1))
    words = [word for word, _, _ in words_of(canvas(draw.timeline, seen, step=0))]
    assert "ag 2" in words and "ag 3" not in words


def test_kinds_of_collectives_are_told_apart(canvas):
    fills = [
        palette.COLLECTIVES.get(op, palette.KINDS["comm"]) for op in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    assert len(set(fills)) == 3
    assert {to_hex(fill).upper() for fill in fills_of(canvas(draw.timeline, busy(2), step=0))} >= set(fills[1:])


def fills_of(canvas):
    return [colour for each in canvas.axes[0].collections for colour in each.get_facecolor()]


def test_what_is_waited_for_in_another_step_is_not_drawn():
    """A shorter step beside a longer one: what came after its end has no place."""
    whole = recording(steps=2)
    bars = timelines.doing(whole, 1, *whole.window(1, 0))
    assert [bar.start for bar in bars if bar.hatch] == [pytest.approx(0.065)]


def test_a_wait_is_drawn_where_it_was():
    """A busy machine: the rank begins to wait when the collective is over, and twice."""
    seen = recording(steps=1)
    seen.events[1].waits = ((0.08, 0.085), (0.09, 0.095))
    bars = timelines.doing(seen, 1, *seen.window(1, 0))
    assert [(bar.start, bar.end) for bar in bars if bar.hatch] == [(0.08, 0.085), (0.09, 0.095)]


def test_two_timelines_have_one_axis():
    ours, native = recording(), recording(late=0.05)
    figure = draw.timeline(ours, native, step=1, names=("ours", "native"))
    assert figure.text == "Timeline(step 1, ours: 2 ranks, 2 events, native: 2 ranks, 2 events)"
    assert "ours: 2 ranks; rank 0 waited 0.0 ms, rank 1 waited 10.0 ms. native: " in figure.alt


def test_two_timelines_may_show_a_step_of_their_own_each():
    """Which one is not said: it may be another in the next run, as the quietest is."""
    ours, native = recording(), recording(late=0.05)
    figure = draw.timeline(ours, native, step=(1, 0), names=("ours", "native"))
    assert figure.text == "Timeline(ours: 2 ranks, 2 events, native: 2 ranks, 2 events)"
    alone = [draw.timeline(seen, step=step).alt.split("; ")[1] for seen, step in ((ours, 1), (native, 0))]
    assert all(waited in figure.alt for waited in alone)
    with pytest.raises(ValueError, match="step has 1 numbers for 2 recordings"):
        draw.timeline(ours, native, step=[1])


def test_memory_that_is_compared_has_one_scale_the_outline_and_the_saving(canvas):
    drawn = canvas(draw.memory, recording(), less(), **NAMED)
    words = [word for word, _, _ in words_of(drawn)]
    assert drawn.axes[0].get_ylim() == drawn.axes[1].get_ylim()
    assert {"one device, rank 0", "stage 3, rank 0", "dashed: one device", "peak 6.00 MiB", "peak 3.00 MiB"} <= set(
        words
    )
    assert "−3.00 MiB" in words
    assert [len(axes.get_lines()) for axes in drawn.axes] == [5, 6], "borders, edge, stem and head; the outline"


def test_phases_of_a_step_are_equally_wide(canvas):
    drawn = canvas(draw.memory, recording(), step=1, ranks=[0])
    assert drawn.axes[0].get_xlim() == (0, 3)
    assert list(drawn.axes[0].get_xticks()) == [0.5, 1.5, 2.5]


def test_marks_of_peaks_strike_no_label(canvas):
    drawn = canvas(*CROWDED["bars"][:1], *CROWDED["bars"][1])
    stems = [line.get_window_extent() for line in drawn.axes[0].get_lines()]
    for word, box, _ in words_of(drawn):
        assert not any(box.padded(-1).overlaps(stem) for stem in stems), word


def test_numbers_do_not_break_from_their_units():
    html = draw.ledger({"sent": (1_638_400, 1_638_500), "step": (None, 0.012, "s")}).html
    assert "1,638,400\N{NO-BREAK SPACE}B (1.56\N{NO-BREAK SPACE}MiB)" in html
    assert "within 0.1\N{NO-BREAK SPACE}%" in html and "measured 12.00\N{NO-BREAK SPACE}ms" in html
    assert "12.00" not in without_noise(html), "a time is noise with any space before its unit"


def test_alternative_text_says_the_numbers():
    assert "rank 0 waited 0.0 ms, rank 1 waited 20.0 ms" in draw.timeline(recording()).alt
    assert "rank 1 6.00 MiB" in draw.memory(recording()).alt
    assert "predicted: P 4 B" in draw.bars({"predicted": {"P": 4}}).alt
    assert "from 5.5000 to 4.0000" in draw.curves({"DDP": [5.5, 4.0]}).alt
    assert 'alt="' in draw.timeline(recording()).html


def test_an_empty_recording_draws():
    nothing = Fake(kind="communication", ranks=1, steps=0, spans=[], events=[], memory=[])
    assert repr(draw.timeline(nothing)) == "Timeline(1 ranks, 0 events)"


def test_figures_save(tmp_path):
    draw.timeline(recording()).save(tmp_path / "a.png")
    draw.mesh({"data": 2}).save(tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8").startswith("<svg")


def test_pyplot_stays_out():
    source = importlib.import_module("labs.kit.drawing.figures").__file__
    with open(source, encoding="utf-8") as file:
        assert "import matplotlib.pyplot" not in file.read(), "its backend belongs to the reader's notebook"
