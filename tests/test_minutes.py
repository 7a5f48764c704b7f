"""Tests of the rule at the head of tools/minutes.py, on a small notebook and on those of the course."""

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tools import minutes
from tools.minutes import Minutes, near

FOUND = minutes.of_all()
PROSE = "word " * 198


def notebook(*texts: str):
    """Return a notebook of these texts, with one code cell behind each."""
    return new_notebook(cells=[cell for text in texts for cell in (new_markdown_cell(text), new_code_cell("1"))])


def test_the_pages_and_the_notebooks_say_what_the_rule_says():
    for path, text in minutes.written().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run `python -m tools.minutes write`"
        assert path.suffix == ".md" or len(minutes.SENTENCE.findall(text)) == 1


@pytest.mark.parametrize("stem", FOUND)
def test_a_notebook_takes_an_hour_and_half_of_one_more_with_its_exercises(stem):
    assert near(FOUND[stem].required) <= 60 and near(FOUND[stem].required + FOUND[stem].exercises) <= 90


def test_the_rule():
    found = minutes.minutes(
        notebook(
            f"# A {PROSE}",  # 200 words: `#` is one
            "### Exercise 1: b (10 minutes)",
            "### Exercise 2 (optional): c (5 minutes)",
            "after an exercise",
            f"## Optional: d\n\n{PROSE}",
            "### Exercise 3: e (7 minutes)",
            "## Beat it: f (30 minutes)",
            "## Say it back",
        )
    )
    heading = 6 / 200  # the heading's `###` is a word
    assert found.required == pytest.approx(2 + 1 + 0.5 + heading + 0.5 + 3 / 200 + 0.5 + 4 / 200 + 0.5)
    assert found.exercises == 10
    assert found.optional == pytest.approx(5 + 7 / 200 + 0.5 + 201 / 200 + 0.5 + 7 + heading + 0.5)
    assert found.challenge == pytest.approx(30 + heading + 0.5)


def test_code_pictures_and_addresses_are_not_read():
    text = "[this](https://example.org/a b)\n\n![one two](x.svg) <img alt='a b' src='y.svg'> page\n\n```text\na b\n```"
    assert minutes.minutes(notebook(text)) == Minutes(required=pytest.approx(2 + 2 / 200 + 0.5))


def test_an_exercise_without_a_budget_is_refused():
    for title in ("### Exercise 1: b", "## Beat it: c"):
        with pytest.raises(ValueError, match="states no minutes"):
            minutes.minutes(notebook(title))


def test_what_is_counted_apart_is_said_apart():
    assert str(Minutes(31, 0, 0, 0)) == "30 without exercises"
    assert str(Minutes(31, 10, 6, 22)) == (
        "30 without exercises, 40 with them, 5 more for optional parts, 20 more for the challenge"
    )
