"""Tests of labs.kit.drawing.tables: the compared numbers, to the digit."""

import sys
import xml.etree.ElementTree as xml

import cloudpickle
import pytest

from labs.kit import draw

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # otherwise each rank imports matplotlib with this module


def test_ledger_reads_like_this():
    ledger = draw.ledger(
        {
            "sent": (1_638_400, 1_638_400),
            "held A": (1000, 1030),
            "peak": (4096, 9000),
            "all-reduces": (3, 3, ""),
            "step": (0.010, 0.01234, "s"),
            "temporary": (None, 5),
        }
    )
    assert repr(ledger).splitlines() == [
        "                          predicted                measured  verdict",
        "───────────  ──────────────────────  ──────────────────────  ──────────────────",
        "sent         1,638,400 B (1.56 MiB)  1,638,400 B (1.56 MiB)  = exact",
        "held A                      1,000 B      1,030 B (1.01 KiB)  ≈ within 5 %",
        "peak             4,096 B (4.00 KiB)      9,000 B (8.79 KiB)  ≠ differs (2.20 ×)",
        "all-reduces                       3                       3  = exact",
        "temporary                         –                     5 B  –",
        "step: predicted 10.00 ms, measured 12.34 ms",
    ]
    assert not ledger.agrees


@pytest.mark.parametrize(
    ("predicted", "measured", "verdict", "agrees"),
    [
        (100, 100, "= exact", True),
        (1_000_000, 1_000_001, "≈ within 0.1 %", True),
        (100, 101, "≈ within 1 %", True),
        (100, 90, "≈ within 10 %", True),
        (100, 89, "≠ differs (0.89 ×)", False),
        (100, 200, "≠ differs (2.00 ×)", False),
        (0, 0, "= exact", True),
        (0, 1, "≠ differs", False),
        (1, float("nan"), "≠ differs (nan ×)", False),
        ("(2, 3)", "(2, 3)", "= exact", True),
        ("(2, 3)", "(3, 2)", "≠ differs", False),
        (None, 7, "–", True),
        (7, None, "–", True),
    ],
)
def test_verdicts(predicted, measured, verdict, agrees):
    ledger = draw.ledger({"row": (predicted, measured, "")})
    assert ledger.verdict(ledger.rows[0]) == verdict
    assert ledger.agrees == agrees


def test_ledger_never_claims_more_than_its_tolerance():
    ledger = draw.ledger({"row": (1000, 1025)}, within=0.03)
    assert ledger.verdict(ledger.rows[0]) == "≈ within 3 %"
    assert not draw.ledger({"row": (1000, 1031)}, within=0.03).agrees


def test_ledger_of_two_sides():
    ledger = draw.ledger([("sent", 100, 100, 200), ("steps", 5, 5, 5, ""), ("held", 7, 7)])
    lines = repr(ledger).splitlines()
    assert lines[0].split() == ["predicted", "ours", "native", "verdict"]
    assert "ours = exact; native ≠ differs (2.00 ×)" in lines[2]
    assert lines[3].endswith("= exact") and "ours" not in lines[3]
    assert lines[4].split()[-2:] == ["=", "exact"] or "–" in lines[4]
    assert not ledger.agrees


def test_times_leave_the_compared_part_alone():
    slow, quick = (
        repr(draw.ledger({"sent": (5, 5), "step": (None, seconds, "s"), "loss": (None, 3.1, "nats")}))
        for seconds in (12.5, 0.0001)
    )
    assert slow.splitlines()[:3] == quick.splitlines()[:3]
    assert slow.splitlines()[3:] == ["step: measured 12.50 s", "loss: measured 3.1000 nats"]
    assert quick.splitlines()[3] == "step: measured 100.00 µs"


def test_tables_in_html_have_scopes_and_no_colours():
    html = draw.ledger({"<sent>": (1, 1)}, caption="A & B")._repr_mimebundle_()["text/html"]
    root = xml.fromstring(f"<div>{html}</div>")
    assert root.find("table/caption").text == "A & B"
    assert {th.get("scope") for th in root.find("table/thead").iter("th")} == {"col"}
    assert [th.text for th in root.find("table/tbody").iter("th")] == ["<sent>"]
    assert root.find("table/tbody/tr/th").get("scope") == "row"
    assert "color" not in html and "background" not in html, "the page's theme decides"


def test_table():
    table = draw.table([{"ranks": 2, "ok": True, "gap": 0.123456}, {"ranks": 4000, "ok": False, "gap": None}])
    assert repr(table).splitlines() == [
        "ranks  ok      gap",
        "─────  ───  ──────",
        "    2  yes  0.1235",
        "4,000  no        –",
    ]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1,024 B (1.00 KiB)"),
        (1.5, "1.5 B"),
        (2**50, f"{2**50:,} B (1,024.00 TiB)"),
    ],
)
def test_size(count, words):
    assert draw.size(count) == words
