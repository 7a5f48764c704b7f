"""Answers on paper to notebook 04: what a rank holds in each stage, and when each stage sends."""

from tests.answers import Exercise

# fmt: off
events = Exercise("stages_by_event")


# ---- stages_by_event: right ------------------------------------------------------------------------------


@events.right(line="right")
def table():
    return {
        "before_forward": ("", "", "all_gather"),
        "after_forward": ("", "", "drop"),
        "before_backward": ("", "", "all_gather"),
        "after_backward": ("", "", "drop"),
        "gradient_ready": ("", "reduce_scatter", "reduce_scatter"),
        "sync": ("reduce_scatter", "", ""),
        "step": ("all_gather", "all_gather", ""),
    }


@events.right
def columns():
    one = ["", "", "", "", "", "reduce_scatter", "all_gather"]
    two = ["", "", "", "", "reduce_scatter", "", "all_gather"]
    three = ["all_gather", "drop", "all_gather", "drop", "reduce_scatter", "", ""]
    return dict(zip(table(), zip(one, two, three, strict=True), strict=True))


# ---- stages_by_event: wrong ------------------------------------------------------------------------------


def rows():
    return table() | {}


but = events.slips(rows, "{}")
LEFT = "a stage does something where nothing is left to do"
NOTHING = '("", "", "")'
THRICE = '("reduce_scatter",) * 3'

but("stage 2 is made to reduce in sync, as stage 1 does",
    '{"gradient_ready": ("", "", "reduce_scatter"), "sync": ("reduce_scatter", "reduce_scatter", "")}')
but("stage 3 is made to gather in its step", '{"step": ("all_gather",) * 3}')
but(LEFT, f'{{"gradient_ready": {THRICE}, "sync": {NOTHING}}}')
