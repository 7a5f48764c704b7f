"""Reference: the course's own answers, as the solutions hand them in; better ones beside this file; and cheats.

What a judge says here is what a learner's notebook says: each answer runs in the same jobs.
"""

import ast
import contextlib
import importlib
import re
import time

import pytest

from labs.__main__ import main
from labs.kit import beat, progress
from labs.kit.challenges import fair, scores
from labs.kit.challenges.challenge import Challenge, Judged
from labs.kit.checks.answer import Wrong
from tests.kit.challenges import better, poor
from tools.notebooks import ROOT

slow_wire, early_start, short_schedule = (
    importlib.import_module(f"labs.kit.challenges.{name}") for name in ("slow_wire", "early_start", "short_schedule")
)


def source(challenge):
    return next((ROOT / "solutions").glob(f"{challenge.notebook}_*.py")).read_text(encoding="utf-8")


def own(challenge):
    """The course's own answer, as a cell of the solution would define it, with the functions that it calls."""
    text = source(challenge)
    name = re.search(rf"beat\.{challenge.name}\((\w+)\)", text)[1]
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    called = {each.id for each in ast.walk(functions[name]) if isinstance(each, ast.Name)}
    keep = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    keep += [node for key, node in functions.items() if key == name or key in called]
    namespace = {"__name__": "answer"}
    for node in keep:
        with contextlib.suppress(NameError):  # the default of an argument, from another cell
            exec(compile(ast.Module([node], []), name, "exec"), namespace)
    return namespace[name]


def said(answer):
    return float(re.search(r"([\d.]+) points", str(answer))[1])


# ---- what is shipped -------------------------------------------------------------------------------------


@pytest.mark.parametrize("challenge", beat.ALL, ids=lambda each: each.name)
def test_the_courses_own_answer_has_what_the_page_says_and_can_be_beaten(challenge):
    assert said(challenge(own(challenge))) == challenge.course
    assert said(challenge(getattr(better, challenge.name))) == challenge.possible > challenge.course
    assert challenge.floor < challenge.course and f"{challenge.floor:.1f}" in source(challenge)


@pytest.mark.parametrize(
    "challenge, straightforward",
    [
        (beat.slow_wire, poor.ring),
        (beat.early_start, poor.one_for_each),
        (beat.large_model, poor.copies),
        (beat.stops, poor.straight),
        (beat.in_time, poor.when_needed),
        (beat.least_again, poor.all_but_attention),
        (beat.cheap_save, poor.written_by_the_first),
        (beat.boundary, poor.in_one_group),
        (beat.short_schedule, poor.zero_bubble),
        (beat.best_mesh, poor.as_in_the_notebook),
        (beat.five_questions, poor.fully_sharded),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_straightforward_answer_has_the_floor(challenge, straightforward):
    assert said(challenge(straightforward)) == challenge.floor


# ---- what scores nothing ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "challenge, fn, why",
    [
        (beat.slow_wire, poor.untouched, "not yet"),
        (beat.slow_wire, poor.nothing, "element 0 is"),
        (beat.slow_wire, poor.torchs_own, "it calls all_reduce"),
        (
            beat.slow_wire,
            poor.without_the_recorder,
            "more went over the connections|right even where messages carry zeros",  # the first on Linux
        ),
        (beat.slow_wire, poor.with_another_clock, "time.monotonic_ns was put in another's place"),
        (beat.slow_wire, poor.with_another_send, "torch.distributed.isend was put in another's place"),
        (beat.slow_wire, poor.through_the_store, "right even where messages carry zeros"),
        (beat.slow_wire, poor.in_float32, r"\.\d{10,}, and not .*\n.*in float64"),
        (beat.slow_wire, poor.with_torchs_operators, "nobody waited for this.*\n.*not of torch.ops"),
        (beat.slow_wire, poor.without_waiting, "nobody waited for this"),
        (beat.early_start, poor.untouched, "not yet"),
        (beat.early_start, poor.one_is_missing, "must be in one bucket, once"),
        (beat.early_start, poor.another_on_each_rank, "called all_reduce"),
        (beat.early_start, poor.a_number, "it returned 3"),
        (beat.large_model, poor.untouched, "not yet"),
        (beat.large_model, poor.nobody_averages, "on one process with AdamW"),
        (beat.large_model, poor.too_large, "MB, and has 4"),
        (beat.large_model, poor.no_losses, "was never called"),
        (beat.in_time, poor.untouched, "not yet"),
        (beat.in_time, poor.all_at_once, "bytes are held at once, and the budget is 80,000"),
        (beat.in_time, poor.without_a_drop, r"\('gather', 3\): that is here already"),
        (beat.in_time, poor.without_a_gather, r"\('forward', 0\): that is not here"),
        (beat.in_time, poor.without_the_last, "each forward in order, then each backward, and a drop"),
        (beat.in_time, poor.a_number, "it returned 3"),
        (beat.least_again, poor.untouched, "not yet"),
        (beat.least_again, poor.as_it_was, "1.000 × what was held is held, where 0.56 × is the most"),
        (beat.least_again, poor.another_model, "0.56: different outputs"),
        (beat.least_again, poor.without_dropout, "with dropout: different outputs"),
        (beat.cheap_save, poor.untouched, "not yet"),
        (beat.cheap_save, poor.over_the_last, "copies, save 1.*\n.* is due in 'rank 0', which is torn"),
        (
            beat.cheap_save,
            poor.without_a_meeting,
            "halves, save 0, rank 0 has made its rename, the others have not begun",
        ),
        (beat.cheap_save, poor.names_are_late, "all ranks have returned: the power goes\n.*'index' is not there"),
        (beat.cheap_save, poor.removed_too_early, "copies, save 1, rank 0 has made its remove.*\n.*which has it not"),
        (beat.cheap_save, poor.never_removed, "bytes on the disk, with room for"),
        (beat.cheap_save, poor.an_index_of_each, "ranks 0 and 1 both touch 'index'"),
        (beat.cheap_save, poor.nothing_has_changed, "copies, save 1, .*\n.*is not that of the step"),
        (beat.cheap_save, poor.in_half_the_bytes, "is not that of the step"),
        (beat.boundary, poor.untouched, "not yet"),
        (beat.boundary, poor.own_features, "the gradient of x is wrong"),
        (beat.boundary, poor.short_numbers, "the gradient of x is wrong"),
        (beat.boundary, poor.of_all_tokens, "y for this rank's tokens is needed"),
        (beat.boundary, poor.with_y_from_the_store, "y is right even where messages carry zeros"),
        (beat.short_schedule, poor.untouched, "not yet"),
        (beat.short_schedule, poor.without_a_limit, "activations alive, and room for 8"),
        (beat.short_schedule, poor.only_half, "there are 8 stages and 8 micro-batches"),
        (beat.short_schedule, poor.without_a_backward, "even: "),
        (beat.best_mesh, poor.untouched, "not yet"),
        (beat.best_mesh, poor.half_of_the_ranks, "there are 8 ranks, and these are 4"),
        (beat.best_mesh, poor.a_copy_on_each_rank, "keeps 1/1 of the state, and has room for 1/8"),
        (beat.best_mesh, poor.shards_outside, "replicate stands before shard"),
        (beat.best_mesh, poor.sizes_alone, "a size for each of some axes is needed"),
        (beat.best_mesh, poor.another_mesh_on_each_rank, "ranks make different meshes"),
        (beat.five_questions, poor.untouched, "not yet"),
        (beat.five_questions, poor.all_in_the_plan, r"calls the plan's peak\(\): only ask"),
        (beat.five_questions, poor.one_question_too_many, "has asked 5 times, and asks once more"),
        (beat.five_questions, poor.on_half_of_the_cluster, "but there are 16 GPUs"),
        (beat.five_questions, poor.with_all_kept, "GB more than a card"),
        (beat.five_questions, poor.a_plan, "a plan.Layout is needed"),
        (beat.stops, poor.untouched, "not yet"),
        (beat.stops, poor.elsewhere, "and not the target"),
        (beat.stops, poor.with_other_numbers, "the numbers are others"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_what_scores_nothing_says_why(challenge, fn, why):
    answer = challenge(fn)
    assert not answer and re.search(why, str(answer))


def test_what_is_patched_in_the_notebook_scores_nothing(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 0)
    assert "time.perf_counter is not what" in str(beat.slow_wire(poor.ring))


@pytest.mark.parametrize(
    "challenge, name, value",
    [
        (slow_wire, "LATENCY", 1e-6),
        (early_start, "STEPS", {"even": early_start.STEPS["even"]}),
        (short_schedule, "CASES", {}),
    ],
)
def test_other_constants_score_nothing(monkeypatch, challenge, name, value):
    monkeypatch.setattr(challenge, name, value)
    assert f"{challenge.__name__}.{name} is not what the course" in str(beat.slow_wire(poor.ring))


def test_a_search_has_time_and_an_end(monkeypatch):
    monkeypatch.setattr("labs.kit.challenges.challenge.LIMIT", 1.0)
    with pytest.raises(Wrong, match="took longer than 1 s"):
        beat.early_start.judge(poor.without_an_end)


# ---- a learner's tries -----------------------------------------------------------------------------------


NOTEBOOK = '{"cells": [{"cell_type": "code", "source": ["check.toy(mine)"]}]}'


def judge(fn):
    return Judged(fn(), "of nothing")


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course with one challenge, in whose notebooks a learner works."""
    for folder in "notebooks", "solutions":
        (tmp_path / "course" / folder).mkdir(parents=True)
    (tmp_path / "course/notebooks/02_talk.ipynb").write_text(NOTEBOOK)
    (tmp_path / "course/solutions/02_talk.py").write_text(
        'def answer():\n    """Points."""\n    points = 50\n    return points\n'
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
    told = capsys.readouterr().out
    assert "your best: 80.1 (6 tries); straightforward 10.0" in told
    assert "02 toy: 80.1; straightforward 10.0" in told


def test_the_courses_own_answer_by_other_names_is_not_a_learners(course):
    def mine():
        n = 50
        return n

    assert "the course's own answer" in str(course(mine))
    assert not scores.read(progress.course_here())


def test_a_class_can_be_shown_without_names(course, tmp_path, capsys):
    for name, best in {"anna": 20.0, "ben": 61.2}.items():
        (tmp_path / name).mkdir()
        progress.write(tmp_path / name, {"toy": [best, 1.0]}, scores.FILE)
    folders = [str(tmp_path / name) for name in ("anna", "ben")]
    assert main(["challenges", *folders]) == 0
    assert re.search(r"anna +20\.0", capsys.readouterr().out)
    assert main(["challenges", "--no-names", *folders]) == 0
    told = capsys.readouterr().out
    assert re.search(r"learner 1 +61\.2\nlearner 2 +20\.0", told) and "anna" not in told
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


def test_the_course_itself_is_not_taken_for_a_patch():
    assert fair.replaced() == ""
