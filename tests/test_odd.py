"""The table of odd trainings (odd.py): under every strategy, each is right or refused as it says, on all ranks."""

from dataclasses import replace

import pytest

from labs.kit.strategies import STRATEGIES
from tests.odd import ODD, ROWS, Odd, faults, steps, takes

TABLE = {row: [odd for odd in ODD if takes(row, odd)] for row in ROWS}
# Of what stages 1 and 2 of ZeRO share, each takes a half; of the others a fifth, and where 8 ranks are needed a tenth.
EVERY = dict.fromkeys(("ddp-overlapped", "zero-3", "fsdp", "tp", "pp-1f1b"), 1) | {"zero-1": 2, "zero-2": 2}
SOME = {
    row: TABLE[row][number % every :: every]
    for number, row in enumerate(ROWS)
    for every in [EVERY.get(row, 5 if ROWS[row].ranks < 8 else 10)]
}


def test_every_strategy_of_ours_is_in_the_table():
    assert set(ROWS) == {row.name for row in STRATEGIES if row.side == "ours"}
    assert len({odd.name for odd in ODD}) == len(ODD) >= 60


@pytest.mark.parametrize("row", ROWS)
def test_right_or_refused(row):
    assert faults(row, SOME[row]) == {}


@pytest.mark.soak
@pytest.mark.parametrize("row", [row for row in ROWS if EVERY.get(row) != 1])
def test_right_or_refused_all(row):
    assert faults(row, TABLE[row]) == {}


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("row", [row for row in ROWS if ROWS[row].ranks == 2 and not row.startswith(("tp", "pp"))])
def test_right_or_refused_on_more_ranks(row, ranks):
    assert faults(row, TABLE[row], ranks) == {}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore:grad and param do not obey:UserWarning")  # a transposed weight: only slower
@pytest.mark.parametrize("row", ROWS)
def test_right_or_refused_in_micro_batches(row):
    assert faults(row, [replace(odd, micro_batches=3) for odd in TABLE[row]]) == {}


def test_a_training_that_is_wrong_is_noticed():
    def reads_the_part_of_another_rank(t, odd):
        t.part = 0
        steps(t, odd)

    wrong, not_refused = Odd("wrong", train=reads_the_part_of_another_rank), Odd("sparse gradients")
    assert set(faults("ddp-naive", [wrong, not_refused])) == {"wrong", "sparse gradients"}
