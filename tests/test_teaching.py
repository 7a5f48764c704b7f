"""Tests that teaching/mistakes.md is what the checks say, and of the checks' rows themselves."""

import re

from tools import teaching


def test_the_table_is_up_to_date():
    text = teaching.PAGE.read_text(encoding="utf-8")
    assert teaching.printed(text) == text, "run `python -m tools.teaching`"


def test_every_row_that_is_printed_has_a_name_and_a_question():
    rows = teaching.rows()
    assert len(rows) > 10
    for row in rows:
        assert row.name and row.question.endswith(("?", ".")) and "|" not in row.symptom + row.name + row.question


def test_a_table_that_was_changed_by_hand_is_seen():
    text = teaching.PAGE.read_text(encoding="utf-8")
    changed = re.sub("summed instead of averaged", "added up", text)
    assert teaching.printed(changed) == text
