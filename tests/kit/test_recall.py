"""Tests of recall against the bank as it is written, and the notebooks that its questions are about."""

import re

import pytest

from labs.kit import recall
from tools import notebooks

SOURCES = notebooks.sources(notebooks.ROOT)
NUMBERS = [source.stem.partition("_")[0] for source in SOURCES]
ROWS = [row for rows in recall.bank().values() for row in rows]


def test_every_notebook_has_questions_enough():
    assert list(recall.bank()) == NUMBERS
    assert all(len(rows) >= 6 for rows in recall.bank().values())


def test_every_question_is_well_formed():
    for row in ROWS:
        assert row.question.endswith("?"), row
        assert row.answer.endswith(".") and len(row.answer) < 360, row
        assert (row.question + row.answer).count("`") % 2 == 0 and "<" not in row.question + row.answer, row


def test_no_question_is_there_twice():
    assert len({row.question for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("number", NUMBERS[1:])
def test_three_questions_on_earlier_notebooks_and_one_of_them_on_the_last(number):
    before = NUMBERS[: NUMBERS.index(number)]
    for seed in range(20):
        chosen = recall.ask(number, seed).chosen
        books = [each.notebook for each in chosen]
        assert len(set(chosen)) == 3 and set(books) <= set(before) and books[0] == before[-1]
        assert len(set(books)) == min(3, len(before))


def test_every_run_has_others_and_a_seed_has_the_same():
    drawn = {str(recall.ask("04", seed)) for seed in range(50)}
    assert len(drawn) > 40
    assert str(recall.ask("04", 7)) == str(recall.ask("04", 7))
    assert len({str(recall.ask("10")) for _ in range(20)}) > 1
    asked = {each for seed in range(400) for each in recall.ask("04", seed).chosen}
    assert asked == {row for row in ROWS if row.notebook < "04"}, "each of them comes up"


def test_ten_across_all_in_the_order_of_the_course():
    chosen = recall.ten(seed=3).chosen
    books = [each.notebook for each in chosen]
    assert len(chosen) == 10 and books == sorted(books) and len(set(books)) == min(10, len(NUMBERS))


@pytest.mark.parametrize("notebook", ["00", "4", "99", "zero"])
def test_a_notebook_without_earlier_questions_is_refused(notebook):
    with pytest.raises(ValueError, match=f"no questions before '{notebook}': ask for one of 01, 02"):
        recall.ask(notebook)


def test_answers_are_folded_and_code_is_set_as_code():
    question = recall.Question("02", "Is `a < b` & so?", "It's `a`.")
    assert "<summary>Is <code>a &lt; b</code> &amp; so?</summary>" in question.html
    asked = recall.Questions((question,))
    assert str(asked) == "? Is `a < b` & so? (notebook 02)" and "It's" not in str(asked)
    html = asked._repr_html_()
    assert html.count("<details") == html.count("</details>") == 1
    assert html.index("It&#x27;s <code>a</code>.") > html.index("</summary>")


def test_other_questions_are_noise_between_two_runs_but_their_number_is_compared():
    seen = [
        {"text/plain": str(asked), "text/html": asked._repr_html_()} for asked in (recall.ask("09"), recall.ask("09"))
    ]
    one, other, ten = (notebooks.without_noise(each) for each in [*seen, {"text/html": recall.ten()._repr_html_()}])
    assert one == other
    assert one["text/html"] != ten["text/html"]
    assert not re.search("Notebook", one["text/html"])
