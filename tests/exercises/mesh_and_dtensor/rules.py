"""Answers to rules (05): rows for operations that labs.dtensor refuses."""

from tests.answers import Exercise

# fmt: off
answers = Exercise("rules")
LINE = "five rows, each on all layouts of its inputs, 53 in all: whole tensors' numbers, and no byte wasted"


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE)
def rows():
    return {
        "cumsum": ("a.->a.", "together"),
        "logsumexp": ("a.->a", ""),
        "trace": ("..->", "together"),
        "linalg_cross": ("a.,a.->a.", "each"),
        "convolution": ("nc.,oc.->no.", "each"),
    }


answers.vary(rows,
    {'("a.->a.", "together")': '["r.->r.", "each"]',
     '("..->", "together")': '("..->", "first")',
     '"nc.,oc.->no."': '"bi.,ji.->bj."'}, line=LINE)

# ---- wrong -----------------------------------------------------------------------------------------------

slip = answers.slips(rows)
NUMBERS, LAYOUT, BYTES = (
    "cut where a block is not enough",
    "the result is laid out differently",
    "a dim stays whole that could be cut",
)
SUMMANDS, UNUSED = "linear, where it is not", "not linear, where it is"
LSE = '("a.->a", "")'
slip(NUMBERS, '("a.->a.", "together")', '("ab->ab", "together")')
slip(SUMMANDS, LSE, '("a.->a", "together")')
slip(LAYOUT, '("a.->a.", "together")', '("a.->.a", "together")')
slip(BYTES, LSE, '("..->.", "")')
slip(UNUSED, '("a.->a.", "together")', '("a.->a.", "")')
slip("not a letter for each dim", LSE, '("a.->a.", "")')
slip("not letters and a word", LSE, '("a.->a", "none")')
slip("an operation is missing", '"trace"', '"tr"')


@answers.wrong("not a table")
def as_a_list():
    return list(rows().values())
