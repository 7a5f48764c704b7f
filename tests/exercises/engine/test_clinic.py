"""Tests of the bug clinic: which instruments tell of which case, and that each mended function passes, no faulty one.

Cases share jobs: the table of six takes one job for each kind of recording, and a dry run.
"""

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from labs.exercises.bug_clinic import _case as clinic
from labs.exercises.bug_clinic import late_gather
from tests.depth import deepen

FOLDER = Path(clinic.__file__).parent
CHECKS = {
    path.stem: getattr(import_module(f"labs.exercises.bug_clinic.{path.stem}"), path.stem)
    for path in sorted(FOLDER.glob("[a-z]*.py"))
    if path.stem != "unknown_bug"  # the challenge
}
CASES = {name: check.case for name, check in CHECKS.items()}
REQUIRED = {name: case for name, case in CASES.items() if case.required}
OPTIONAL = {name: case for name, case in CASES.items() if not case.required}
both = pytest.mark.parametrize("cases", [REQUIRED, *deepen(OPTIONAL)], ids=["required", "optional"])


def told(cases, instruments=clinic.INSTRUMENTS):
    """Return {case: instruments that tell}."""
    jobs = clinic.Jobs(tuple(cases.values()), seed=3)
    return {name: {each for each in instruments if clinic.read(each, jobs, case).tells} for name, case in cases.items()}


@both
def test_the_table_of_cases_and_instruments_none_of_which_tells_of_a_right_program(cases):
    right = {f"{name}, right": replace(case, faulty=case.right, hangs=False) for name, case in cases.items()}
    assert told(cases | right) == {name: case.tells for name, case in cases.items()} | {name: set() for name in right}


def test_three_instruments_suffice():
    assert clinic.fewest({name: case.tells for name, case in CASES.items()}) == {"numbers", "time", "dry"}


def test_a_hang_is_cut_and_judged_and_readings_are_counted():
    visit = CHECKS["early_return"].visit()
    assert "rank 2" in visit.hang_report().text and visit.counts == {}
    assert visit.look(None, ["verdict"]).text.startswith("not yet") and visit.counts == {}
    readings = visit.look("rank 2 is missing", ["verdict", "sent"]).text
    assert "verdict: on NCCL: hangs for certain" in readings and "does not come to an end" in readings
    assert visit.counts == {"verdict": 1, "sent": 1}
    assert [*visit.bill().values()] == ["rank 2 is missing", "verdict, sent", 2, 1, "verdict, dry"]
    with pytest.raises(ValueError, match="no instrument 'losses': the clinic has numbers, "):
        visit.read("losses")


def test_a_trace_shows_the_gathers_after_all_updates():
    names = late_gather.in_order(late_gather.traced(late_gather.faulty))
    assert [name.split()[0] for name in names] == 4 * ["update"] + 4 * ["c10d::allgather_"]


def test_what_users_saw_of_some_cases():
    rows = CHECKS["inherited_no_sync"].norms(CASES["inherited_no_sync"].faulty)
    one, *more = [(row["four ranks"], row["one process"]) for row in rows]
    assert one[0] == pytest.approx(one[1]) and all(found != pytest.approx(due, rel=0.01) for found, due in more)
    visit = CHECKS["token_mean"].visit()
    tokens = CHECKS["token_mean"].tokens(0)
    mean = sum(tokens) / len(tokens)
    assert visit.factors().flatten().tolist() == pytest.approx([mean / each for each in tokens], rel=1e-4)
    groups = [row["of ranks"] for row in CHECKS["two_orders"].visit().waits()]
    assert groups == ["0 and 1", "1 and 3", "0 and 2", "2 and 3"] and visit.counts == {}


def test_each_case_comes_from_a_published_thread():
    threads = [thread for case in CASES.values() for thread in case.threads]
    form = re.compile(r"([\w.-]+/[\w.-]+)/(?:pull|issues)/\d+ (?:open|closed|merged) 20\d\d-\d\d-\d\d")
    assert len({form.fullmatch(thread)[1] for thread in threads}) >= 8
    assert sorted(case.number for case in CASES.values()) == [*range(1, 13)] and len(REQUIRED) == 6
    assert {case.group for case in REQUIRED.values()} == set("abcdef")
