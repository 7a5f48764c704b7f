"""Tests of drawn schedules: they match the simulated or recorded one, to scale; wrong ones show where and why.

References: labs.pp.simulate, and for a job whose stages sleep, the order that its instructions must have.
"""

import re
import sys
import time
import xml.etree.ElementTree as xml
from itertools import chain, pairwise

import cloudpickle
import pytest
import torch
from torch import nn

from labs import pp
from labs.kit import draw
from labs.kit.drawing import pipeline_overlay
from labs.kit.drawing.palette import INSTRUCTIONS, WRONG
from labs.kit.drawing.pipeline_colours import Fills
from labs.kit.launch import run
from labs.kit.record import instructions, mark
from labs.pp.instructions import makes, needs
from tests.kit.pictures import SVG, drawn, texts, words_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise each rank imports matplotlib with this module


def blocks(drawing, fills):
    """Return (x, y, width) of the blocks of these colours."""
    rects = [rect for rect in xml.fromstring(drawing.svg).iter(f"{SVG}rect") if rect.get("height") == "26"]
    return [tuple(float(rect.get(a)) for a in ("x", "y", "width")) for rect in rects if rect.get("fill") in fills]


# ---- simulated -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pp.SCHEDULES)
def test_blocks_stand_where_instructions_are(name):
    lists, costs = pp.SCHEDULES[name](3, 6), {"F": 1.5, "B": 2, "I": 1.25, "W": 0.75, "send": 0.25}
    of, drawing, fills = pp.simulate(lists, **costs), draw.schedule(lists, **costs), Fills(lists)
    drawn = blocks(drawing, {fills[x] for x in chain(*lists)})
    expected = [(of.start[x], rank, of.end[x] - of.start[x]) for rank, order in enumerate(lists) for x in order]
    scale = drawn[0][2] / expected[0][2]
    left, top = drawn[0][:2]
    for (x, y, width), (start, rank, long) in zip(drawn, expected, strict=True):
        assert (x, y) == pytest.approx((left + scale * start, top + 34 * rank), abs=1.5)
        assert width == pytest.approx(scale * long, abs=0.5)
    assert f"bubble {of.bubble:.1%} (takes {of.time:.4g}, and the busiest rank computes {of.ideal:.4g})" in drawing.text
    most = [max(number for _, number in series) for series in of.alive]
    assert [text for text in texts(drawing) if text.startswith("at most")] == [f"at most {n}" for n in most]


def test_stages_of_a_rank_have_their_shades():
    lists = pp.interleaved(2, 4, 3)
    assert list(Fills(lists).by_shade().values()) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("scale", [1e-6, 1, 1e6])
def test_any_unit_of_time_will_do(scale):
    drawing, one = (draw.schedule(pp.zb1p(2, 4), F=s, B=2 * s, I=s, W=s) for s in (scale, 1))
    fills = INSTRUCTIONS.values()
    drawn = zip(blocks(drawing, fills), blocks(one, fills), strict=True)
    assert all(mine == pytest.approx(reference, abs=0.2) for mine, reference in drawn)


# ---- refused ---------------------------------------------------------------------------------------------


def swapped():
    lists = [list(order) for order in pp.one_f_one_b(4, 8)]
    lists[1][2], lists[1][5] = lists[1][5], lists[1][2]
    return lists


@pytest.mark.parametrize(
    ("lists", "labels", "before"),
    [
        (swapped(), ["1B1", "2F2"], [4, 2, 3, 4]),
        ([[pp.B(0, 0), pp.F(0, 0)]], ["0B0"], [0]),
        ([[pp.F(0, 0), "0F1", pp.B(0, 0)]], ["'0F1'"], [1]),
        ([[pp.F(0, 0), pp.B(0, 0), pp.B(0, 0)]], ["0B0"], [2]),
        ([[pp.F(0, 0), pp.B(0, 0)], [pp.B(1, 0)]], ["?"], [1, 0]),
        ([[pp.F(0, 0), pp.B(0, 0)], [pp.F(1, 0)]], ["1F0"], [1, 0]),
        ([[pp.F(0, 0), pp.I(0, 0)], [pp.F(1, 0), pp.I(1, 0), pp.W(1, 0)]], ["0I0"], [1, 3]),
    ],
)
def test_a_wrong_list_is_drawn_up_to_its_first_wrong_instructions(lists, labels, before):
    with pytest.raises(pp.WrongSchedule) as error:
        pp.validate(lists)
    drawing = draw.schedule(lists)
    assert drawing.text == f"This schedule cannot be run\n{error.value}"
    reason = " ".join(text for text in texts(drawing) if text in str(error.value) and len(text) > 8)
    assert reason == str(error.value)
    root = xml.fromstring(drawing.svg)
    frames = [rect for rect in root.iter(f"{SVG}rect") if rect.get("stroke") == WRONG]
    marked = [t for t in root.iter(f"{SVG}text") if t.get("fill") == WRONG and t.get("font-weight") == "bold"]
    assert len(frames) == len(marked) and [t.text for t in marked] == labels
    drawn = [y for _, y, _ in blocks(drawing, INSTRUCTIONS.values())]
    tops = {float(frame.get("y")) + 2 - 34 * rank for frame, (rank, _) in zip(frames, error.value.places, strict=True)}
    (top,) = tops
    assert [drawn.count(top + 34 * rank) for rank in range(len(lists))] == before


@pytest.mark.parametrize("lists", [[], [[]], "0F0", [3]])
def test_an_invalid_list_has_no_picture(lists):
    with pytest.raises(pp.WrongSchedule, match=r"is no schedule|is empty"):
        draw.schedule(lists)


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ({"F": 0, "B": 0}, "all instructions take 0"),
        ({"F": float("inf")}, "F=inf: give a time of at least 0"),
        ({"B": [1, 2, 3]}, "B=[1, 2, 3]: give a time of at least 0, or one for each of the 2 stages"),
    ],
)
def test_impossible_costs_have_no_picture(costs, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        draw.schedule(pp.gpipe(2, 2), **costs)


# ---- recorded --------------------------------------------------------------------------------------------


class Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(0.01)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient


class Stage(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Sleeps.apply(self.scale * x)


def squares(x, y):
    return (x - y).square().mean()


def sleeping(lists):
    stages = [Stage() for _ in range(4)]
    pipeline = instructions(pp.Pipeline(stages, lists, squares))
    losses = []
    for _ in range(2):
        mark("step")
        losses += pipeline.forward_backward(torch.ones(4, 3), torch.zeros(4, 3))
    mark("end")
    plain = pp.Pipeline(stages, lists, squares).forward_backward(torch.ones(4, 3), torch.zeros(4, 3))
    return [loss.item() for loss in losses[: len(plain)]] == [loss.item() for loss in plain]


LISTS = pp.interleaved(2, 4)


@pytest.fixture(scope="module")
def recording():
    job = run(sleeping, LISTS, ranks=2, record="time")
    assert all(job), "watched, a pipeline computes the same"
    return job.recording


@pytest.mark.parametrize("step", [0, 1])
def test_a_recorded_schedule_has_no_waiting_in_it(recording, step):
    of = recording.schedule(LISTS, step)
    assert min(of.start.values()) == 0
    made = {makes(x): end for x, end in of.end.items()}
    for order in LISTS:
        assert all(of.end[x] <= of.start[y] for x, y in pairwise(order))
    for x in of.start:
        assert of.end[x] - of.start[x] >= (0.01 if isinstance(x, pp.F) else 0.02)
        assert all(made[need] <= of.start[x] for need in needs(x, 4))
    assert of.bubble > 0


def test_the_last_step_is_drawn_beneath_the_simulated_one(recording):
    figure = draw.schedule(LISTS, recording=recording)
    assert figure.text == "Schedule(2 ranks, 4 micro-batches, simulated and recorded)"
    assert figure.alt == draw.schedule(LISTS, recording=recording, step=1).alt
    assert f"recorded: bubble {recording.schedule(LISTS, 1).bubble:.1%} of " in figure.alt
    exact = pp.simulate(LISTS, F=0.01, B=0.02)
    printed = draw.schedule(LISTS, recording=recording, F=0.01, B=0.02).alt
    assert f"simulated: bubble {exact.bubble:.1%} of 240 ms" in printed
    panel = drawn(pipeline_overlay.overlay, LISTS, recording, None, {})[0].axes[0]
    lanes = [{round(path.get_extents().y0) for path in each.get_paths()} for each in panel.collections]
    assert {round(y) for lane in lanes for y in lane} == {0, 16, 44, 60}
    words = words_of(panel.figure)
    assert {"rank 0 simulated", "recorded", "rank 1 simulated", "a later stage"} <= {word for word, _, _ in words}


@pytest.mark.parametrize(
    ("lists", "step", "text"),
    [
        (LISTS, 2, "step 2: rank 0 marked 2 steps"),
        (
            pp.interleaved(2, 6),
            None,
            "0F4 ran 0 times in step 1 of this recording: hand the pipeline to instructions()",
        ),
    ],
)
def test_a_recording_of_something_else_is_refused(recording, lists, step, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        draw.schedule(lists, recording=recording, step=step)
