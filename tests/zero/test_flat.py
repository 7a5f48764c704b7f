"""labs.zero.flat: what stands where a parameter stood, and what happens to it there.

A `Change` is right, or told in a sentence; where it is right, one process does the same.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from labs.kit.launch import run
from labs.zero import Zero
from tests.models import Awkward, batch
from tests.zero.common import ADAMW, SGD, STAGES, Inner, Mean, one_step, said

# ---- bad input -------------------------------------------------------------------------------------------


def test_a_shard_may_be_changed_if_all_ranks_are_told():
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


@pytest.mark.parametrize(
    "read",
    [lambda p: p.sum(), lambda p: p + 1, lambda p: torch.sum(p), lambda p: nn.functional.linear(torch.ones(7), p)],
    ids=["method", "operator", "function", "linear"],
)
def test_a_dropped_parameter_says_so(read):
    def body():
        model = Awkward()
        Zero(model, 3, ADAMW)
        read(model.layers[0][0].weight)

    words = said(body)
    assert "parameter 'layers.0.0.weight' is dropped" in words and "zero.state_dict() has everything" in words


def test_a_dropped_parameter_can_be_shown_and_asked_for():
    def body():
        model = Awkward()
        Zero(model, 3, ADAMW)
        return repr(model.embed.weight), hasattr(model.embed.weight, "_repr_html_"), str(model)

    text, html, shown = run(body, ranks=2)[0]
    assert text.startswith("Dropped(parameter 'embed.weight' is dropped") and not html and "Embedding(11, 7)" in shown


# ---- odd models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_from_before_the_step_is_refused(stage):
    def two_linears():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), Mean())

    words = said(lambda: one_step(stage, two_linears(), after=lambda model, loss: loss.backward()))
    assert "backward() of a loss from before step()" in words


class Keeps(Inner):
    """Leaves something that needs its parameters, where nobody sees it: on itself."""

    def forward(self, x):
        y = self.compute(x)
        self.penalty = self.trained(x.tanh()).square().mean()
        return y


def test_what_is_read_without_being_gathered_is_an_error_and_no_crash():
    def body():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), Keeps(), nn.Linear(5, 5))
        Zero(model, 3, SGD)
        (model(torch.ones(3, 5)).mean() + model[1].penalty).backward()

    assert "modified" in said(body)


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_taken_before_says_so(stage):
    def body():
        model = Awkward()
        early = torch.optim.SGD(model.parameters(), lr=0.1)
        Zero(model, stage, SGD)
        assert "Moved(parameter 'scale'" in repr(early.param_groups[0]["params"][0])
        early.step()

    assert "parameter 'scale' was taken from the model before it was sharded" in said(body)


def change_all(model, change):
    for p in model.parameters():
        change(p)


def shorten_data(p):
    p.data = p.data / 2


def write(p):
    with torch.no_grad():
        p.div_(2)


def replace(layer, attribute, value):
    setattr(layer, attribute, value)


@dataclass
class Change:
    """Something that is done with a model, and what stages 1 and 2 say to it, and stage 3; None, where it is right."""

    happens: Callable = lambda model: None  # before the second step
    flat: str | None = None
    dropped: str | None = None
    later: Callable = lambda model: None  # before the third
    loss: Callable = lambda model, x: model(x)


def gradient_penalty(model, x):
    loss = model(x.requires_grad_())
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


reentrant = partial(checkpoint, use_reentrant=True)
UNFROZEN, DROPPED = (
    "was unfrozen after it was sharded, and no optimizer has it: load zero.state_dict()['model'] into",
    "is dropped: rank",
)
CHANGES = {  # three layers, the bias of the second one frozen
    "a layer is frozen": Change(lambda m: m[0].requires_grad_(False)),
    "and back": Change(lambda m: m[0].requires_grad_(False), later=lambda m: m[0].requires_grad_(True)),
    "all numbers are changed": Change(lambda m: change_all(m, write)),
    "one parameter's are": Change(lambda m: write(m[0].weight), None, DROPPED),
    "a frozen one's are": Change(lambda m: write(m[1].bias), None, DROPPED),
    "other memory": Change(lambda m: change_all(m, shorten_data), "'0.weight' was given other memory (by .data = ...)"),
    "for one": Change(lambda m: shorten_data(m[2].bias), "'2.bias' was given other memory (by .data = ...)", DROPPED),
    "unfrozen": Change(lambda m: m[1].requires_grad_(True), f"'1.bias' {UNFROZEN}", f"'1.bias' {UNFROZEN}"),
    "one frozen": Change(lambda m: m[0].bias.requires_grad_(False), "'0.bias' lies in one vector with", DROPPED),
    "one unfrozen": Change(lambda m: replace(m[1].bias, "requires_grad", True), f"'1.bias' {UNFROZEN}", DROPPED),
    "one of a frozen layer": Change(
        lambda m: m[0].requires_grad_(False),
        f"'0.bias' {UNFROZEN}",
        DROPPED,
        later=lambda m: replace(m[0].bias, "requires_grad", True),
    ),
    "another parameter": Change(
        lambda m: replace(m[0], "weight", nn.Parameter(torch.zeros(5, 5))),
        *["parameter '0.weight' was replaced after its model was sharded"] * 2,
    ),
    "no parameter": Change(lambda m: replace(m[0], "bias", None), *["parameter '0.bias' was replaced after"] * 2),
    "a hook": Change(lambda m: m[0].bias.register_hook(print), "'0.bias' has a hook, which the next step", DROPPED),
    "a copy": Change(deepcopy, *["this Linear cannot be copied or pickled: what it computes with is in"] * 2),
    "float": Change(lambda m: m.float(), *["became torch.float32 on cpu: convert or move a model before"] * 2),
    "compiled": Change(lambda m: m[0].compile(backend="eager"), *["Linear.compile() takes in Zero's hooks, too"] * 2),
    "weights of another layer": Change(dropped=DROPPED, loss=lambda m, x: m(x @ m[2].weight)),
    "gradient penalty": Change(dropped="create_graph=True: stage 3 has dropped", loss=gradient_penalty),
    "reentrant checkpoints": Change(loss=lambda m, x: m[2:](reentrant(m[1], reentrant(m[1], m[0](x))))),
    "less in the last micro-batch": Change(loss=lambda m, x: m(x).backward() or m[2:](x)),
}


def losses_of(change, stage):
    """Of four steps with Zero, or on one process (stage 0), and of an evaluation before each."""
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


def test_what_happens_to_a_sharded_model_is_right_or_told():
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


def test_a_vector_that_is_replaced_is_told():
    def body():
        for stage in STAGES:
            model = nn.Linear(2, 1, bias=False)
            nn.init.ones_(model.weight)
            Zero(model, stage, SGD)
            with pytest.raises(RuntimeError, match="was replaced, as"):
                torch.func.functional_call(model, {"flat0": torch.ones(2)}, (torch.ones(1, 2),))

    run(body, ranks=2)
