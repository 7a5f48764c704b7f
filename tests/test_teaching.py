"""Tests that the tables in teaching/ are what the checks and the notebooks say, and of the checks' rows themselves."""

from tools import teaching


def test_the_tables_are_up_to_date():
    for path, text in teaching.pages().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `python -m tools.teaching`"


def test_every_row_that_is_printed_has_a_name_and_a_question():
    rows = teaching.rows()
    assert len(rows) > 10
    for row in rows:
        assert row.name and row.question.endswith(("?", ".")) and "|" not in row.symptom + row.name + row.question


def test_a_table_that_was_changed_by_hand_is_seen():
    text = (teaching.FOLDER / "mistakes.md").read_text(encoding="utf-8")
    changed = text.replace("summed instead of averaged", "added up")
    assert changed != text and teaching.printed(changed, teaching.mistakes()) == text
