"""Tests of the odd trainings (odd.py): under every strategy, each is right or refused as the table says, on
all ranks.
"""

from dataclasses import replace

import pytest

from labs.kit.training.strategies import EXPERTS, STRATEGIES
from tests.odd import ODD, ROWS, Odd, faults, steps, takes

TABLE = {row: [odd for odd in ODD if takes(row, odd)] for row in ROWS}
# zero-3 and fsdp share many trainings, and each takes half of them, as does tp. Rows whose code others have, too, take
# a thirty-second.
EVERY = {"ddp-overlapped": 1, "zero-3": 2, "fsdp": 2, "tp": 2, "pp-1f1b": 1}
SOME = {row: TABLE[row][number % EVERY.get(row, 32) :: EVERY.get(row, 32)] for number, row in enumerate(ROWS)}


def test_every_strategy_of_ours_is_in_the_table():
    assert set(ROWS) == {row.name for row in (*STRATEGIES, *EXPERTS) if row.side == "ours"}
    assert len({odd.name for odd in ODD}) == len(ODD) >= 60


@pytest.mark.parametrize("row", ROWS)
def test_right_or_refused(row):
    assert faults(row, SOME[row]) == {}


@pytest.mark.depth
@pytest.mark.parametrize("row", [row for row in ROWS if EVERY.get(row) != 1])
def test_right_or_refused_all(row):
    assert faults(row, TABLE[row]) == {}


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("row", [row for row in ROWS if ROWS[row].ranks == 2 and not row.startswith(("tp", "pp"))])
def test_right_or_refused_on_more_ranks(row, ranks):
    assert faults(row, TABLE[row], ranks) == {}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")  # a transposed weight is only slower
@pytest.mark.parametrize("row", ROWS)
def test_right_or_refused_in_micro_batches(row):
    assert faults(row, [replace(odd, micro_batches=3) for odd in TABLE[row]]) == {}


def test_a_training_that_is_wrong_is_noticed():
    def reads_the_part_of_another_rank(t, odd):
        t.part = 0
        steps(t, odd)

    wrong, not_refused = Odd("wrong", train=reads_the_part_of_another_rank), Odd("sparse gradients")
    assert set(faults("ddp-naive", [wrong, not_refused])) == {"wrong", "sparse gradients"}
