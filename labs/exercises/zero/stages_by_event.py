"""stages_by_event: a table from memory of what each stage of ZeRO does at each event of a step."""

from collections.abc import Callable
from typing import Any

from labs.exercises.engine.answer import Mistake, answered
from labs.exercises.engine.on_paper import Sheet, WrongSheet, as_if, form, on_paper, plain, same

STAGES = {  # {event: what stages 1, 2 and 3 do there}, as in the head of labs/zero/zero.py
    "before_forward": ("", "", "all_gather"),
    "after_forward": ("", "", "drop"),
    "before_backward": ("", "", "all_gather"),
    "after_backward": ("", "", "drop"),
    "gradient_ready": ("", "reduce_scatter", "reduce_scatter"),
    "sync": ("reduce_scatter", "", ""),
    "step": ("all_gather", "all_gather", ""),
}


@answered
def stages_by_event(fn: Callable[..., Any], seed: int) -> str:
    """Check `fn() -> {event: (stage 1, stage 2, stage 3)}`, each "all_gather", "drop", "reduce_scatter" or ""."""
    return on_paper(
        fn,
        [Sheet((), STAGES, "the table", secret=True)],
        BY_EVENT,
        "What does a rank need at this event that it does not hold?",
    )


def at_a_stage(test: Callable[[str, str], bool]) -> Callable[[WrongSheet], str | None]:
    """Return a function that names the stages that pass `test(received, expected)` at the first wrong event."""

    def matches(seen: WrongSheet) -> str | None:
        found, expected = plain(seen.received), plain(seen.sheet.expected)
        if form(found) != form(expected):
            return None
        event = next(event for event in expected if not same(found[event], expected[event]))
        if form(found[event]) != "list" or len(found[event]) != len(expected[event]):
            return None
        pairs = enumerate(zip(found[event], expected[event], strict=True), 1)
        stages = [str(stage) for stage, pair in pairs if pair[0] != pair[1] and test(*pair)]
        return (
            f"{seen.description}; wrong for stage{'s' * (len(stages) > 1)} {' and '.join(stages)}" if stages else None
        )

    return matches


# fmt: off
BY_EVENT = (
    Mistake("stage 2 is made to reduce in sync, as stage 1 does", "What would a rank hold at the end of backward?",
            as_if(lambda: STAGES | {"gradient_ready": ("", "", "reduce_scatter"),
                                    "sync": ("reduce_scatter",) * 2 + ("",)})),
    Mistake("stage 3 is made to gather in its step",
            "Which parameters does it update, and who needs them whole before the next forward?",
            as_if(lambda: STAGES | {"step": ("all_gather",) * 3})),
    Mistake("a stage does something where nothing is left to do",
            "What has this stage done already before this event, or what does it do later?",
            at_a_stage(lambda found, expected: not expected)),
    Mistake("", "What does a rank hold at this event, and which part of it does it need from now on?",
            at_a_stage(lambda found, expected: True)),
)
# fmt: on
