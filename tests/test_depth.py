"""Tests of breadth and depth: what `make test` leaves out, and the parts of `make soak`."""

import argparse
from itertools import chain

import pytest

from tests import conftest
from tests.depth import deepen


def test_further_configurations_are_marked():
    for value, parameter in zip([3, (2, 2)], deepen(3, (2, 2)), strict=True):
        assert parameter.values == (value,) and [mark.name for mark in parameter.marks] == ["depth"]


def test_parts_are_everything_once_and_keep_groups_whole():
    tests = [f"tests/test_quick.py::test_{number}" for number in range(5)]
    cells = [f"{folder}/03_ddp.ipynb::Cell {number}" for folder in ("solutions", "notebooks") for number in range(3)]
    parts = conftest.split_in_parts([*tests, *cells], 3)
    assert sorted(chain.from_iterable(parts)) == sorted([*tests, *cells])
    assert parts[2] == [tests[2], *cells]
    assert conftest.split_in_parts(tests, 1) == [tests]


def test_a_part_that_is_none_is_refused(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", type=conftest.read_part)
    assert parser.parse_args(["--part", "2/3"]).part == (2, 3)
    for text in ("0/3", "4/3", "2", "a/b"):
        with pytest.raises(SystemExit):
            parser.parse_args(["--part", text])
        assert f"invalid read_part value: '{text}'" in capsys.readouterr().err
