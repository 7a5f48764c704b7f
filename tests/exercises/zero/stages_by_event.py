"""Answers on paper to notebook 04: what a rank holds in each stage, and when each stage sends."""

from tests.answers import Exercise

# fmt: off
events = Exercise("stages_by_event")



# ---- stages_by_event: right ------------------------------------------------------------------------------


@events.right(line="right", blind=True)
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


@events.right(blind=True)
def columns():
    one = ["", "", "", "", "", "reduce_scatter", "all_gather"]
    two = ["", "", "", "", "reduce_scatter", "", "all_gather"]
    three = ["all_gather", "drop", "all_gather", "drop", "reduce_scatter", "", ""]
    return dict(zip(table(), zip(one, two, three, strict=True), strict=True))


@events.right(blind=True)
def rules():
    def what(event, stage):
        if event.startswith(("before_", "after_")):
            return ("all_gather" if event.startswith("before_") else "drop") if stage == 3 else ""
        if event in ("gradient_ready", "sync"):
            return "reduce_scatter" if (stage > 1) == (event == "gradient_ready") else ""
        return "all_gather" if stage < 3 else ""

    return {event: tuple(what(event, stage) for stage in (1, 2, 3)) for event in table()}


# ---- stages_by_event: wrong ------------------------------------------------------------------------------


def rows():
    return table() | {}


but = events.slips(rows, "{}")
LEFT = "a stage does something where nothing is left to do"
NOTHING = '("", "", "")'
THRICE = '("reduce_scatter",) * 3'

but("stage 2 is made to reduce in sync, as stage 1 does",
    '{"gradient_ready": ("", "", "reduce_scatter"), "sync": ("reduce_scatter", "reduce_scatter", "")}',
    blind=True)
but("stage 3 is made to gather in its step", '{"step": ("all_gather",) * 3}', blind=True)
but(LEFT, f'{{"gradient_ready": {THRICE}, "sync": {NOTHING}}}', blind=True)
but("a gather is missing", f'{{"before_backward": {NOTHING}}}')
but("", f'{{"after_forward": {NOTHING}, "before_backward": {NOTHING}}}', blind=True)
