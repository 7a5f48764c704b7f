"""Answers on paper to notebook 02: how long an all-reduce takes, as a ring and as a tree; what rings send."""

from fractions import Fraction  # noqa: F401  (as above)

from tests.answers import Exercise

# fmt: off
sendings = Exercise("sent_by_rings")


# ---- sent_by_rings: right --------------------------------------------------------------------------------

SIX = "right on all 6 examples"


@sendings.right(line=SIX)
def sent(ranks):
    part = (ranks - 1) / ranks
    return {"reduce_scatter": part, "all_gather": part, "all_reduce": 2 * part, "all_to_all": part}


PART, SUM = "(ranks - 1) / ranks", "2 * part"

sendings.vary(sent, {PART: "Fraction(ranks - 1, ranks)"}, line=SIX)
# ---- sent_by_rings: wrong --------------------------------------------------------------------------------

sendings.spoil(sent, "all_reduce once instead of twice", {SUM: "part"})
sendings.spoil(sent, "(N − 1) tensors instead of pieces", {PART: "ranks - 1"})
sendings.spoil(sent, "N pieces, and not N − 1", {PART: "1"})
