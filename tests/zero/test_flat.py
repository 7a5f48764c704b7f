"""Tests of labs.zero.flat: what replaces a parameter, and what happens to it.

A `Change` is right, or refused in a sentence; if it is right, one process does the same.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from labs.kit.launch import run
from labs.zero import Zero
from tests.models import Awkward, batch
from tests.zero.common import ADAMW, SGD, STAGES, Mean

# ---- bad input -------------------------------------------------------------------------------------------


def test_a_shard_may_be_changed_with_a_refresh_on_all_ranks():
    def body():
        seen = []
        for stage in STAGES:
            zero = Zero(model := Awkward(), stage, ADAMW)
            with torch.no_grad():
                for shard in zero.shards:
                    shard.fill_(0.5)
            zero.refresh(zero.units)
            seen.append(model(batch(0, 0)).item())
        return seen

    results = run(body, ranks=2)
    assert len(set(results[0] + results[1])) == 1


def test_a_dropped_parameter_can_be_shown_and_asked_for():
    def body():
        model = Awkward()
        Zero(model, 3, ADAMW)
        return repr(model.embed.weight), hasattr(model.embed.weight, "_repr_html_"), str(model)

    text, html, shown = run(body, ranks=2)[0]
    assert text.startswith("Dropped(parameter 'embed.weight' is dropped") and not html and "Embedding(11, 7)" in shown


# ---- odd models ------------------------------------------------------------------------------------------


def shorten_data(p):
    p.data = p.data / 2


def write(p):
    with torch.no_grad():
        p.div_(2)


def replace(layer, attribute, value):
    setattr(layer, attribute, value)


@dataclass
class Change:
    """A change of a model, and the refusals of stages 1 and 2, and of stage 3; None if it is right."""

    happens: Callable = lambda model: None  # called before the second step
    flat: str | None = None
    dropped: str | None = None
    later: Callable = lambda model: None  # called before the third step
    loss: Callable = lambda model, x: model(x)


UNFROZEN, DROPPED = (
    "was unfrozen after it was sharded, and no optimizer has it: load zero.full_state_dict() into",
    "is dropped: rank",
)
CHANGES = {  # changes besides the odd trainings (tests/odd.py): three layers, the bias of the second one frozen
    "one parameter's are": Change(lambda m: write(m[0].weight), None, DROPPED),
    "a frozen one's are": Change(lambda m: write(m[1].bias), None, DROPPED),
    "for one": Change(lambda m: shorten_data(m[2].bias), "'2.bias' was given other memory (by .data = ...)", DROPPED),
    "one unfrozen": Change(lambda m: replace(m[1].bias, "requires_grad", True), f"'1.bias' {UNFROZEN}", DROPPED),
    "one of a frozen layer": Change(
        lambda m: m[0].requires_grad_(False),
        f"'0.bias' {UNFROZEN}",
        DROPPED,
        later=lambda m: replace(m[0].bias, "requires_grad", True),
    ),
    "no parameter": Change(lambda m: replace(m[0], "bias", None), *["parameter '0.bias' was replaced after"] * 2),
    "a hook": Change(lambda m: m[0].bias.register_hook(print), "'0.bias' has a hook, which the next step", DROPPED),
    "float": Change(lambda m: m.float(), *["became torch.float32 on cpu: convert or move a model before"] * 2),
    "compiled": Change(
        lambda m: m[0].compile(backend="eager"), *["Linear.compile() would compile Zero's hooks, too"] * 2
    ),
}


def losses_of(change, stage):
    """Return the losses of four steps with Zero, or on one process (stage 0), and of an evaluation before each."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)), Mean()).double()
    model[1].bias.requires_grad_(False)
    optimizer, losses, x = Zero(model, stage, SGD) if stage else SGD(list(model.parameters())), [], torch.ones(3, 5)
    for step in range(4):
        for event in [change.happens] * (step == 1) + [change.later] * (step == 2):
            event(model)
        with torch.inference_mode():
            losses.append(model(x.double()))
        losses.append(change.loss(model, x.double()))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def test_changes_of_a_sharded_model_are_right_or_refused():
    right = [case for case, change in CHANGES.items() if None in (change.flat, change.dropped)]
    [plain] = run(lambda: {case: losses_of(CHANGES[case], 0) for case in right}, ranks=1)
    cases = [(case, stage) for case in CHANGES for stage in STAGES]

    def outcome(case, stage):
        try:
            return losses_of(CHANGES[case], stage)
        except RuntimeError as error:
            return str(error)

    for outcomes in run(lambda: [outcome(*case) for case in cases], ranks=2):
        for (case, stage), got in zip(cases, outcomes, strict=True):
            sentence = CHANGES[case].dropped if stage == 3 else CHANGES[case].flat
            if sentence is None:
                assert got == pytest.approx(plain[case]), (case, stage)
            else:
                assert sentence in str(got), (case, stage)


def test_a_vector_that_is_replaced_is_reported():
    def body():
        for stage in STAGES:
            model = nn.Linear(2, 1, bias=False)
            nn.init.ones_(model.weight)
            Zero(model, stage, SGD)
            with pytest.raises(RuntimeError, match="was replaced, as"):
                torch.func.functional_call(model, {"flat0": torch.ones(2)}, (torch.ones(1, 2),))

    run(body, ranks=2)
