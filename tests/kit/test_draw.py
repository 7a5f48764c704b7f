"""Tests of what drawings are made of: messages, pieces and borders; and of the errors (pictures: test_gallery.py)."""

import sys
from collections import defaultdict
from types import SimpleNamespace as Fake

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labs import collectives
from labs.kit import draw
from labs.kit.drawing import tensor_parallel_plan
from labs.kit.drawing.collective_messages import after, own, sends
from labs.kit.drawing.tables import short
from labs.kit.launch import run
from labs.tp import conjugate
from tests.kit.drawing.gallery import DOUBLING, TREE
from tests.kit.pictures import RING, recording

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise each rank imports matplotlib with this module


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


def test_a_plan_tells_what_crosses_each_border():
    """Check against the table at the head of labs.tp.conjugate, and labs.tp.parameter_cuts for the heads of a rank."""
    lines = [line.split() for line in conjugate.__doc__.splitlines()]
    table = {
        words[0]: words[-2:]
        for words in lines
        if words and words[0] in tensor_parallel_plan.BORDERS and len(words) == 7
    }
    for name, (forward, backward) in tensor_parallel_plan.BORDERS.items():
        assert table[name] == [way.replace("-", "_") or "-" for way in (forward, backward)]
    assert len(table) == len(tensor_parallel_plan.BORDERS)


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
