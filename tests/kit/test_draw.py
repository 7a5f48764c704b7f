"""Tests of drawings: they say what they were given, look the same each time, and are legible.

References: the numbers handed in; and whether words fit, by the metrics of DejaVu Sans, the widest of the usual fonts.
"""

import base64
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from functools import partial
from types import SimpleNamespace as Fake

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labs import collectives, pp
from labs.dtensor import Partial, Replicate, Shard
from labs.dtensor.placement import Spec
from labs.kit import draw
from labs.kit.drawing import palette, plans
from labs.kit.drawing.diagrams import after, own, sends
from labs.kit.drawing.tables import short
from labs.kit.launch import run
from labs.kit.watch.folders import Moment
from labs.model import GPT, PRESETS
from labs.tp import ColwiseParallel, LossParallel, conjugate, gpt_plan
from tests.kit.pictures import RING, SVG, recording, require_legible, texts
from tools import images

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise each rank imports matplotlib with this module

TREE = [(k, r, r + 2**k, 0) for k in range(3) for r in range(2**k)]
DOUBLING = [(k, r, r ^ 2**k, 0) for k in range(3) for r in range(8)]
MOMENTS = [Moment("make step-1.draft", (), ""), Moment("flush", ("step-1.draft/index.json",), "step-0")]
EVERYBODY = [(0, s, d, d) for s in range(5) for d in range(5) if s != d]
DRAWINGS = {
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
    "nodes as a rank sees them": lambda: draw.nodes({"pp": 2, "replicate": 1, "tp": 4}, node=4, rank=5),
    "blocks": lambda: draw.blocks(Spec((7, 5), (2, 3), (Shard(0), Shard(1))), ("data", "tensor")),
    "summands": lambda: draw.blocks(Spec((12,), (4,), (Partial(),)), ("data",)),
    "empty blocks": lambda: draw.blocks(Spec((3, 4), (4,), (Shard(0),)), ("data",)),
    "plan": lambda: draw.plan(gpt_plan(PRESETS["small"], True), GPT(PRESETS["small"])),
    "plan without a weight": lambda: draw.plan({"loss": LossParallel(256)}, GPT(PRESETS["tiny"]), ranks=3),
    "reads": lambda: draw.reads(12, 4, 3),
    "folder": lambda: draw.folder(MOMENTS, 1),
    "chart": lambda: draw.chart({"ring": 0.0012, "recursive doubling": 0.0031}, "s", caption="8 ranks, 1 MB"),
    "stacked": lambda: draw.chart({"stage 0": {"P": 4, "G": 4, "S": 8}, "stage 3": {"P": 1, "G": 1, "S": 2}}),
    "wrong schedule": lambda: draw.schedule([[pp.F(0, 0), pp.B(0, 0), pp.F(0, 1)], [pp.F(1, 0), pp.F(1, 1)]]),
    "schedule without a forward": lambda: draw.schedule([[pp.F(0, 0), pp.B(0, 0)], [pp.B(1, 0)]]),
} | {picture.__name__: picture for picture in images.PICTURES}
DRAWINGS |= {f"{name} schedule": partial(draw.schedule, lists(4, 8)) for name, lists in pp.SCHEDULES.items()}

# ---- the ledger ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (lambda: draw.table([]), "at least one row"),
        (lambda: draw.table([{"a": 1}, {"b": 1}]), r"row 1 has the columns \('b',\)"),
        (lambda: draw.ledger({"sent": (1,)}), "'sent' holds 1 values"),
        (lambda: draw.ledger({"sent": (1, 2, 3, 4, "B")}), "'sent' holds 4 values"),
        (lambda: draw.step(RING, 4, 7), "choose 0 to 6"),
        (lambda: draw.mesh({"a": 2, "b": 2, "c": 2}), "3 axes"),
        (lambda: draw.nodes({"pp": 2, "tp": 3}, node=4), "6 ranks do not fill nodes of 4: give"),
        (lambda: draw.memory(recording(), step=0, names=("one",)), "1 names for 2 panels"),
        (lambda: draw.memory(Fake(kind="time", seen=range(2), memory=[])), "'time' has no bytes held"),
    ],
)
def test_wrong_input_is_reported_in_a_sentence(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        wrong()


# ---- drawings from data ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWINGS)
def test_same_data_same_bytes(name):
    one, other = DRAWINGS[name]()._repr_mimebundle_(), DRAWINGS[name]()._repr_mimebundle_()
    assert one == other
    assert set(one) == {"text/html", "text/plain"}


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_is_an_image_with_alternative_text_that_shrinks(name):
    """Check an <img>:

    JupyterLab shows neither image/svg+xml nor <svg> of an untrusted notebook (test_browser sees to that).
    """
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


@pytest.mark.parametrize("name", DRAWINGS)
def test_words_fit_and_do_not_overlap(name):
    drawing = DRAWINGS[name]()
    require_legible(drawing)
    root = xml.fromstring(drawing.svg)
    assert min(float(text.get("font-size")) for text in root.iter(f"{SVG}text")) >= 10


@pytest.mark.parametrize("name", [picture.__name__ for picture in images.PICTURES])
def test_images_are_up_to_date(name):
    kept = (images.IMAGES / f"{name}.svg").read_text(encoding="utf-8")
    assert kept == DRAWINGS[name]().svg, "run `make images`"


def test_a_plan_tells_what_crosses_each_border():
    """Check against the table at the head of labs.tp.conjugate, and labs.tp.shares for which rank has which heads."""
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
    labels = texts(whole)
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
    held = own(4, 4)
    for number in range(6):
        held = after(held, [message for message in RING if message[0] == number])
        if number == 2:
            assert all(held[rank][rank] == {0, 1, 2, 3} for rank in range(4)), "reduce-scatter: piece r on rank r"
    assert held == [{piece: {0, 1, 2, 3} for piece in range(4)}] * 4


def test_a_round_sends_what_was_there_before_it():
    held = after([{0: {0}}, {}, {}], [(0, 0, 1, 0), (0, 1, 2, 0)])
    assert held == [{0: {0}}, {0: {0}}, {0: set()}]


@pytest.mark.parametrize(("messages", "ranks"), [(RING, 4), (TREE, 8), (DOUBLING, 8)], ids=["ring", "tree", "doubling"])
def test_rounds_are_found_again_in_a_recording(messages, ranks):
    """Check with receives posted before sends on every rank, which waits for both; ranks run at their own pace."""
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
    found = sends(Fake(seen=range(ranks), events=events))
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
    named = draw.chart({"a": {"waiting": 3.0, "comm": 1.0}}, "%", words={"waiting": "work done again"}).svg
    assert ">work done again<" in named and ">waiting<" not in named and ">comm<" in named
    assert draw.chart({"a": 0.0012, "bb": 0.5}, "s").text == "a   1.2 ms\nbb  500 ms"
