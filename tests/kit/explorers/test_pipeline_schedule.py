"""Tests of the schedule explorer, which shows what labs.pp says, and of the film of micro-batches.

The reference is labs.pp called by hand: its checks, and its simulation of each moment.
"""

import itertools
import xml.etree.ElementTree as xml

import pytest

from labs import pp
from labs.kit import draw, play
from labs.kit.drawing.palette import KINDS
from labs.kit.explorers import microbatches, pipeline_schedule
from tests.kit.pictures import SVG, require_legible, texts
from tests.kit.test_play import saved

# ---- the explorer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 4), ("zb1p", 2), ("zbv", 2)])
def test_it_shows_what_pp_simulates(name, stages):
    widget = play.schedule(
        schedule=name, ranks=3, microbatches=6, stages_per_rank=stages, forward=1.5, backward=3, send=0.2
    )
    lists = pp.SCHEDULES[name](3, 6, stages)
    costs = {"F": 1.5 / stages, "B": 3 / stages, "I": 1.5 / stages, "W": 1.5 / stages, "send": 0.2 * 1.5}
    assert widget.still.svg == draw.schedule(lists, **costs).svg
    of = pp.simulate(lists, **costs)
    assert of.ideal == pytest.approx(6 * 4.5), "ranks compute as much with several stages as with one"
    assert f"bubble {of.bubble:.1%}" in widget.still.text
    require_legible(widget.still)


def test_a_schedule_comes_with_its_usual_number_of_stages():
    widget = play.schedule()
    for name in (*pp.SCHEDULES, "1f1b"):
        widget.controls["schedule"].value = name
        assert f"{name} takes" not in widget.stage.value, "it is drawn, and not refused"
        assert widget.settings["stages_per_rank"] == (2 if name in ("interleaved", "zbv", "dualpipev") else 1)


@pytest.mark.parametrize("name", pp.SCHEDULES)
def test_what_a_schedule_cannot_do_is_said_in_its_sentence(name):
    refused = 0
    for ranks, number, stages in itertools.product((1, 2, 5, 8), (1, 4, 7, 9), (1, 2, 3)):
        settings = {"schedule": name, "ranks": ranks, "microbatches": number, "stages_per_rank": stages}
        try:
            expected = pp.SCHEDULES[name](ranks, number, stages)
        except ValueError as error:
            refused += 1
            drawing = pipeline_schedule.picture(**pipeline_schedule.BEGIN | settings)
            assert drawing.text == str(error)
            require_legible(drawing)
        else:
            if number == 4:
                text = pipeline_schedule.picture(**pipeline_schedule.BEGIN | settings).text
                assert text.splitlines()[1:-1] == repr(expected).splitlines()[:-1]
    assert refused >= 4


# ---- the film --------------------------------------------------------------------------------------------


def squares(drawing, fill):
    rects = xml.fromstring(drawing.svg).iter(f"{SVG}rect")
    return [rect for rect in rects if rect.get("fill") == fill and rect.get("width") == str(microbatches.SMALL)]


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_each_moment_is_that_of_the_simulation(name):
    of = pp.simulate(pp.SCHEDULES[name](2, 4), F=1, B=2, send=0.5)
    widget = play.microbatches(of.lists, F=1, B=2, send=0.5)
    times = microbatches.moments(of)
    assert widget.controls["frame"].max == len(times) - 1 and set(times) == {*of.start.values(), of.time}
    for now in times:
        flow, gantt = microbatches.picture(of, now).pictures
        for rank, (order, series) in enumerate(zip(of.lists, of.alive, strict=True)):
            running = [x for x in order if of.start[x] <= now < of.end[x]]
            doing = f"runs {running[0]!r}" if running else "waits"
            assert f"Rank {rank} {doing}." in flow.text
            assert series[-1][1] == 0
        alive = sum([0, *(number for moment, number in series if moment <= now)][-1] for series in of.alive)
        assert len(squares(flow, KINDS["A"])) == alive
        require_legible(flow)
        assert gantt.text.splitlines()[1:] == repr(of).splitlines()


def test_micro_batches_wait_where_they_are_needed_next():
    of = pp.simulate(
        [[pp.F(0, 0), pp.F(0, 1), pp.B(0, 1), pp.B(0, 0)], [pp.F(1, 0), pp.F(1, 1), pp.B(1, 1), pp.B(1, 0)]], F=[1, 3]
    )
    moment = microbatches.PipelineState(of, 2)
    assert (moment.waits(1, (pp.F,)), moment.runs(1), moment.holds(1), moment.holds(0)) == (
        [1],
        pp.F(1, 0),
        [0],
        [0, 1],
    )
    assert microbatches.PipelineState(of, 4).waits(1, (pp.F,)) == []
    assert microbatches.PipelineState(of, 3.5).waits(0, (pp.F,)) == [], "nobody makes what the first stage takes"


def test_many_micro_batches_are_counted():
    of = pp.simulate(pp.gpipe(2, 16), F=[1, 9])
    flow, _ = microbatches.picture(of, 16).pictures
    words = texts(flow)
    assert "+7" in words and "+13" in words
    require_legible(flow)


def test_the_film_is_saved_in_its_middle_and_refuses_a_wrong_list():
    widget = play.microbatches(pp.gpipe(2, 2))
    times = microbatches.moments(pp.simulate(pp.gpipe(2, 2)))
    assert f"Time {times[len(times) // 2]:g}" in saved(widget)[0]["text/plain"]
    widget.controls["frame"].value = 1
    assert "Time 1." in widget.stage.value
    with pytest.raises(pp.WrongSchedule):
        play.microbatches([[pp.B(0, 0), pp.F(0, 0)]])
