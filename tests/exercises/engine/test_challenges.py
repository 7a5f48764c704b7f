"""Tests of the challenges: the course's own answers score what the solutions print; better ones, poor ones, wrong ones.

A judge decides here as in a learner's notebook: each answer runs in the same jobs.  Of a long challenge (LONG),
`make test` runs the better answer and the first that scores nothing; the others are depth.
"""

import functools
import importlib
import json
import math
import re

import pytest

from labs import collectives, plan
from labs.__main__ import main
from labs.exercises.engine import scores
from labs.exercises.engine.answer import Wrong
from labs.exercises.engine.challenge import Challenge, Judged
from labs.kit import beat
from labs.kit.learners import progress
from tests.exercises.engine import better, poor
from tests.extras import need_deepspeed, need_jax
from tools.notebooks import ROOT

slow_wire, best_mesh, fewest_bytes, knobs = (
    importlib.import_module(each.judge.__module__)
    for each in (beat.slow_wire, beat.best_mesh, beat.fewest_bytes, beat.knobs)
)
NEEDS = {"fewest_bytes": need_jax, "knobs": need_deepspeed}
LONG = dict.fromkeys(
    (
        "slow_wire",
        "large_model",
        "stops",
        "least_again",
        "cheap_save",
        "boundary",
        "best_mesh",
        "knobs",
        "five_questions",
        "unknown_bug",
    ),
    pytest.mark.depth,
)


def said(answer):
    return float(re.search(r"([\d.]+) points", str(answer))[1])


# ---- the course's answers --------------------------------------------------------------------------------

STRAIGHTFORWARD = {
    "slow_wire": poor.ring,
    "early_start": poor.one_for_each,
    "large_model": poor.copies,
    "stops": poor.straight,
    "in_time": poor.when_needed,
    "least_again": poor.all_but_attention,
    "hidden_disk": poor.one_by_one,
    "cheap_save": poor.written_by_the_first,
    "boundary": poor.in_one_group,
    "short_schedule": poor.zero_bubble,
    "best_mesh": poor.as_in_the_notebook,
    "packed": poor.every_fourth,
    "place_experts": poor.side_by_side,
    "fewest_bytes": poor.as_fsdp,
    "knobs": poor.as_stage_3,
    "five_questions": poor.fully_sharded,
    "unknown_bug": poor.all_instruments,
}


@pytest.mark.parametrize(
    "challenge", [pytest.param(each, id=each.name, marks=LONG.get(each.name, ())) for each in beat.ALL]
)
def test_there_is_room_below_the_courses_own_answer(challenge):
    NEEDS.get(challenge.name, int)()
    assert said(challenge(STRAIGHTFORWARD[challenge.name])) == challenge.floor < challenge.course


def test_the_layouts_that_an_answer_asks_about_are_told():
    setup = beat.five_questions.cases[0]
    small, large = (poor.sharded(setup, recompute=each) for each in ("full", "none"))
    told = beat.five_questions.measured(lambda setup, ask: [ask(small), ask(large)], setup)
    assert told == {str(small): plan.plan(setup, small).seconds, str(large): math.inf}  # the large one does not fit
    with pytest.raises(RuntimeError, match="has asked 5 times, and asks once more"):
        beat.five_questions.measured(poor.one_question_too_many, setup)


@pytest.mark.parametrize("challenge", beat.ALL, ids=lambda each: each.name)
def test_there_is_room_above_the_courses_own_answer(challenge):
    NEEDS.get(challenge.name, int)()
    assert said(challenge(getattr(better, challenge.name))) == challenge.possible > challenge.course


@pytest.mark.parametrize("challenge", beat.ALL, ids=lambda each: each.name)
def test_the_page_says_the_floor_and_what_the_courses_own_answer_has(challenge):
    """Compare the page with the judge. The solution also runs in the suite, which compares what it prints."""
    (path,) = (ROOT / "solutions").glob(f"{challenge.notebook}_*.ipynb")
    assert f"{challenge.floor:.1f}" in path.with_suffix(".py").read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    (outputs,) = (each["outputs"] for each in cells if f"beat.{challenge.name}(" in "".join(each["source"]))
    assert f"✓ {challenge.name}: {challenge.course:.1f} points of 100" in json.dumps(outputs, ensure_ascii=False)


# ---- answers that score nothing --------------------------------------------------------------------------


WRONG = {
    "slow_wire": {poor.nothing: "element 0 is"},
    "early_start": {poor.one_is_missing: "must be in one bucket, once"},
    "large_model": {poor.too_large: "MB, and may hold 4"},
    "in_time": {poor.all_at_once: "bytes are held at once, and the budget is 80,000"},
    "least_again": {poor.without_dropout: "with dropout: different outputs"},
    "hidden_disk": {poor.all_in_memory: "bytes are held at once, and the budget is 96,000,000"},
    "cheap_save": {poor.over_the_last: "copies, save 1.*\n.* is expected in 'rank 0', which is torn"},
    "boundary": {poor.own_features: "the gradient of x is wrong"},
    "short_schedule": {poor.without_a_limit: "activations alive, and room for 8"},
    "best_mesh": {poor.a_copy_on_each_rank: "keeps 1/1 of the state, and has room for 1/8"},
    "packed": {poor.one_after_the_other: "rank 3 has 35,050 products, and may have 22,055"},
    "place_experts": {poor.the_busiest_alone: "each of the 4 ranks has room for 4 experts"},
    "five_questions": {poor.one_question_too_many: "has asked 5 times, and asks once more"},
    "unknown_bug": {poor.one_guess: "says 'cast' of a program with the bug .*, and has read held: "},
    "knobs": {poor.as_stage_2: "few rows: .* bytes are held, and the budget is 430,000"},
    "stops": {poor.elsewhere: "and not the target"},
}


def test_a_sum_is_tried_as_the_judge_counts_it():
    took = beat.slow_wire.measured(lambda x, *wire: collectives.all_reduce_doubling(x), 100, 2)
    assert took == pytest.approx(1e-3 + 800 / 8e6)  # one message each way


def test_a_block_is_tried_as_the_judge_runs_it():
    tried, block = beat.boundary.measured("few tokens", poor.in_one_group), beat.boundary.cases["few tokens"]
    # Forward and backward have a ring that gathers, with 3 quarters from one rank of the node to the other node's, and
    # an all-to-all, with a quarter from each of two ranks to each of two others.
    messages, numbers = 2 * (1 + 4), 2 * (3 + 4) * block.tokens // 4 * block.width
    assert tried == (messages, numbers, pytest.approx(messages * 0.5e-3 + numbers / 1e6))
    assert tried.seconds > beat.boundary.bound(block)


def test_a_path_is_tried_as_the_judge_counts_it():
    way = beat.stops.cases[4]  # from S0, P, S1 to S0, R, R: 96 elements are gathered along c, then 192 added up along b
    assert beat.stops.measured(poor.straight, *way) == 8 * (96 + 192) * 8 > beat.stops.bound(*way)
    with pytest.raises(Wrong, match="not the target"):
        beat.stops.measured(poor.elsewhere, *way)


def test_a_step_under_a_limit_is_tried_as_the_judge_measures_it():
    held, again, least = beat.least_again.measured(poor.all_but_attention, 0.28)
    assert held < 0.28 and least < again < 1
    with pytest.raises(Wrong, match=r"and 0\.2 × is the limit"):
        beat.least_again.measured(poor.all_but_attention, 0.2)


def test_saves_are_tried_as_the_judge_times_them():
    case = beat.cheap_save.cases["copies"]
    took = beat.cheap_save.measured(poor.written_by_the_first, "copies")
    # Rank 0 writes and flushes all of the state, then the index, and then flushes its name.
    assert took == pytest.approx(8 * ((128 * sum(case.rows) + 32 * len(case.rows)) / 8e6 + 3 * 0.5e-3))
    assert took > beat.cheap_save.bound(case)
    with pytest.raises(Wrong, match="which is torn"):
        beat.cheap_save.measured(poor.over_the_last, "copies")


def test_an_unknown_program_is_tried_and_its_readings_are_told():
    tried = beat.unknown_bug.measured(better.unknown_bug, seed=3)
    assert tried["named"] == tried["planted"] in beat.unknown_bug.cases
    assert "numbers" in tried["readings"] and len(tried["readings"]) < 5
    with pytest.raises(ValueError, match="there is no instrument 'clock'"):
        beat.unknown_bug.measured(lambda visit: visit.read("clock"))
    with pytest.raises(ValueError, match="it returned 'slow', and one of the kinds is needed: summed"):
        beat.unknown_bug.measured(lambda visit: "slow")


@pytest.mark.parametrize("challenge", beat.ALL, ids=lambda each: each.name)
def test_a_stub_is_not_yet_an_answer(challenge):
    assert challenge(poor.untouched).ok is None


@pytest.mark.parametrize(
    "name, fn",
    [
        pytest.param(name, fn, marks=LONG.get(name, ()) if number else ())
        for name in WRONG
        for number, fn in enumerate(WRONG[name])
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_scores_nothing_says_why(monkeypatch, name, fn):
    monkeypatch.setattr(slow_wire, "RANKS", (4,))  # few ranks are enough for a wrong sum
    monkeypatch.setattr(slow_wire, "SIZES", (100, 8_000))
    monkeypatch.setattr(knobs, "SETUPS", {"few rows": knobs.SETUPS["few rows"]})
    NEEDS.get(name, int)()
    with pytest.raises(Wrong) as wrong:
        getattr(beat, name).judge(fn)
    assert re.search(WRONG[name][fn], str(wrong.value.answer))


@pytest.mark.parametrize(
    "axes, why",
    [
        ({"pp": 2, "shard": 2}, "there are 8 ranks, and these are 4"),
        ({"shard": 8, "replicate": 1}, "replicate stands before shard"),
        ((2, 2, 2), "a size for each of some axes is needed"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(axes, why):
    with pytest.raises(ValueError, match=why):
        best_mesh.require_mesh(axes, best_mesh.CASES["few tokens"])


@pytest.mark.parametrize(
    "given, why",
    [
        ({"kept": ("ab", "")}, "more than 1/8 of the array"),
        ({"used": ("a", "a")}, "an axis is one of a, b, c, and cuts one dim, once"),
        ({"used": ("d", "")}, "an axis is one of a, b, c"),
        ({"used": "abc"}, "'abc' is no layout"),
        ({"layers": 3}, "2 pairs of layouts are needed, and 3"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(given, why):
    with pytest.raises(ValueError, match=why):
        fewest_bytes.on_a_rank(functools.partial(poor.as_fsdp, **given))


@pytest.mark.parametrize(
    "config, why",
    [
        (3, "it returned 3: .* is needed, and nothing else"),
        ({knobs.MICRO: 8, knobs.ZERO: {"stage": 2}, "bf16": {"enabled": True}}, "and nothing else"),
        ({knobs.MICRO: 8, knobs.ZERO: {"offload_optimizer": {"device": "cpu"}}}, "offload_optimizer is a dict"),
        ({knobs.MICRO: 3, knobs.ZERO: {"stage": 2}}, "is 3, which does not divide 8 rows"),
    ],
)
def test_a_configuration_that_cannot_be_tried_is_refused(config, why):
    with pytest.raises(ValueError, match=why):
        knobs.measured("few rows", config)


def test_a_search_has_time_and_an_end(monkeypatch):
    monkeypatch.setattr("labs.exercises.engine.challenge.LIMIT", 1.0)
    with pytest.raises(Wrong, match="took longer than 1 s of processor time"):
        beat.early_start.judge(poor.without_an_end)


# ---- a learner's tries -----------------------------------------------------------------------------------


NOTEBOOK = '{"cells": [{"cell_type": "code", "source": ["check.toy(mine)"]}]}'


def judge(fn):
    return Judged(fn(), "of nothing")


@pytest.fixture
def course(tmp_path, monkeypatch):
    """Make a course with one challenge, in whose notebooks a learner works."""
    for folder in "notebooks", "solutions":
        (tmp_path / "course" / folder).mkdir(parents=True)
    (tmp_path / "course/notebooks/02_talk.ipynb").write_text(NOTEBOOK)
    (tmp_path / "course/solutions/02_talk.py").write_text(
        'def answer():\n    """Points."""\n    ### BEGIN SOLUTION\n    points = 50\n    return points\n'
        "    ### END SOLUTION\n\n\n"
        "def start():\n    return 20\n"
    )
    monkeypatch.chdir(tmp_path / "course/notebooks")
    one = Challenge("toy", "02", "A toy", "Return points.", judge, floor=10.0, course=50.0, possible=80.0)
    monkeypatch.setattr(beat, "ALL", (one,))
    return one


def test_tries_are_kept_drawn_and_shown(course, capsys, monkeypatch):
    assert str(course(lambda: 20)).startswith("✓ toy: 20.0 points of 100")
    assert "tries: 20.0, 61.2" in str(course(lambda: 61.24).picture)
    for points, news in (50, ""), (70, ": your best so far and above the course's own"), (80.1, ": above all that is"):
        assert str(course(lambda points=points: points)).startswith(f"✓ toy: {points:.1f} points of 100{news}")
    assert not course(3)
    monkeypatch.setenv("LABS_PLOT", "off")
    assert course(lambda: 30).picture is None
    assert main(["challenges"]) == main(["progress"]) == 0
    printed = capsys.readouterr().out
    assert "your best: 80.1 (6 tries); straightforward 10.0" in printed
    assert "02 toy: 80.1; straightforward 10.0" in printed


def test_a_class_can_be_shown_without_names(course, tmp_path, capsys):
    for name, best in {"anna": 20.0, "ben": 61.2}.items():
        (tmp_path / name).mkdir()
        progress.write(tmp_path / name, {"toy": [best, 1.0]}, scores.FILE)
    folders = [str(tmp_path / name) for name in ("anna", "ben")]
    assert main(["challenges", *folders]) == 0
    assert re.search(r"anna +20\.0", capsys.readouterr().out)
    assert main(["challenges", "--no-names", *folders]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"learner 1 +61\.2\nlearner 2 +20\.0", printed) and "anna" not in printed
    assert main(["challenges", "nobody"]) == 1


def test_a_broken_file_begins_anew(course, capsys):
    (progress.course_here() / scores.FILE).write_text('{"toy": ["much"]}')
    assert main(["challenges"]) == 1 and "is broken" in capsys.readouterr().err
    assert course(lambda: 20)
    assert scores.read(progress.course_here()) == {"toy": [20.0]}


def test_outside_of_a_learners_notebook_nothing_is_kept(course, monkeypatch):
    monkeypatch.chdir("../solutions")
    assert course(lambda: 20)
    assert not scores.read(progress.course_here())
