"""Tests of the course's layers under spmd_types, and of a spmd_types that is pretended to be missing."""

import pytest

from labs.kit.dry import accepted_layers, on_pretended_ranks
from labs.kit.extras import types_of_layers


def test_rules_from_placements_make_spmd_types_accept_every_layer():
    pytest.importorskip("spmd_types")
    rows = on_pretended_ranks(accepted_layers, ranks=8)
    assert {row["unchanged"] for row in rows} == {"refused"}
    assert [row["with a rule"] for row in rows] == ["I → V", "V → I", "R → I", "V → I", "V → V", "V → V", "V → V"]
    passes = [row[""] for row in rows if row["without its borders"] != "refused"]
    assert passes == ["split cross-entropy", "columns, sequence parallel"]


def test_a_spmd_types_that_is_missing_is_reported_with_the_command_that_adds_it(monkeypatch):
    monkeypatch.setattr(types_of_layers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="spmd_types is not installed: `make learn EXTRA=types` adds it"):
        on_pretended_ranks(accepted_layers)
