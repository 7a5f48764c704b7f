"""The checks of notebook 07 against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own, torch's, and answers that go another way about it.  Wrong: tests/wrong_answers/memory.py.
The bytes that a check measures are held to the table of labs/memory/recompute.py, which tests/memory/test_recompute.py
derives.
"""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torchs

from labs.kit import check
from labs.memory import recompute
from labs.memory.selective import ATTENTION, MATMULS
from tests.answers.together import SEED
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.memory import around, checkpoint, halves, itself, place

CHECKS = ["checkpoint", "place_checkpoints"]


# ---- right answers ---------------------------------------------------------------------------------------


def every_second_in_full(model):
    layers = list(model.layers.values())
    around(recompute.checkpoint, layers[-2::-2])
    recompute.recompute(layers[::-2], keep=MATMULS | ATTENTION)


def one_by_one(model):
    """In full the first half, by number; the others one by one."""
    for number, layer in enumerate(model.layers.values()):
        recompute.recompute([layer], keep=MATMULS | ATTENTION if number >= len(model.layers) // 2 else ())


def torchs_wrapper(model):
    """It is a module of its own, and state_dict() does not show it."""
    for name in list(model.layers)[: len(model.layers) // 2]:
        model.layers[name] = checkpoint_wrapper(model.layers[name])
    recompute.recompute(halves(model)[1], keep=MATMULS | ATTENTION)


def torchs_policy(model):
    def policy(context, op, *args, **kwargs):
        kept = str(op.overloadpacket) in MATMULS | ATTENTION
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, last = halves(model)
    around(partial(torchs, use_reentrant=False), first)
    context = partial(create_selective_checkpoint_contexts, policy)
    around(partial(torchs, use_reentrant=False, context_fn=context), last)


AGAIN = "× the layers' forward is computed again (budget"
RIGHT = [
    (check.checkpoint, checkpoint, f"0.21 × the memory (budget 0.30); 1.00 {AGAIN} 1.00)"),
    (check.checkpoint, recompute.checkpoint, f"0.20 × the memory (budget 0.30); 1.00 {AGAIN} 1.00)"),
    (check.checkpoint, partial(torchs, use_reentrant=False), f"0.20 × the memory (budget 0.30); 0.80 {AGAIN} 1.00)"),
    (check.place_checkpoints, place, f"0.38 × the memory (budget 0.40); 0.50 {AGAIN} 0.50)"),
    (check.place_checkpoints, every_second_in_full, f"0.38 × the memory (budget 0.40); 0.50 {AGAIN} 0.50)"),
    (
        check.place_checkpoints,
        one_by_one,
        f"0.38 × the memory (budget 0.40); 0.50 {AGAIN} 0.50)",
    ),
    (check.place_checkpoints, torchs_wrapper, f"0.38 × the memory (budget 0.40); 0.40 {AGAIN} 0.50)"),
    (check.place_checkpoints, torchs_policy, f"0.38 × the memory (budget 0.40); 0.40 {AGAIN} 0.50)"),
]


@pytest.mark.parametrize(("judge", "fn", "line"), RIGHT, ids=lambda x: getattr(x, "__name__", ""))
def test_a_right_answer_is_accepted(judge, fn, line):
    answer = judge(fn, seed=SEED)
    assert answer.ok is True, answer
    assert str(answer) == f"✓ {judge.__name__}: {line}"


def test_on_a_disk_is_right_too(tmp_path):
    """Nothing is computed again; what is kept lies in files."""

    def on_a_disk(model):
        numbers, parameters = itertools.count(), {p.untyped_storage().data_ptr() for p in model.parameters()}

        def pack(tensor):
            if tensor.untyped_storage().data_ptr() in parameters:
                return tensor
            file = tmp_path / str(next(numbers))
            torch.save(tensor.detach().clone(), file)
            return file

        def unpack(kept):
            return torch.load(kept) if isinstance(kept, Path) else kept

        def fn(layer, x):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return layer(x)

        around(fn, model.layers.values())

    answer = check.place_checkpoints(on_a_disk)
    assert str(answer) == f"✓ place_checkpoints: 0.06 × the memory (budget 0.40); 0.00 {AGAIN} 0.50)"


# ---- not yet ---------------------------------------------------------------------------------------------


def test_an_untouched_stub_is_not_yet():
    def place_checkpoints(model):
        raise NotImplementedError("your turn")

    def untouched(layer, x):
        def unpack(number):
            raise NotImplementedError("your turn")

        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: 0, unpack):
            return layer(x)

    for name, fn in (("place_checkpoints", place_checkpoints), ("checkpoint", untouched)):
        answer = getattr(check, name)(fn)
        assert answer.ok is None
        assert str(answer) == f"not yet: {name} (the stub is untouched; the notebook goes on with the course's own)"


# ---- wrong answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_are_called_by_their_names(name):
    assert sum(answer.check == name and answer.listed for answer in ANSWERS) >= 8
    assert let_past(name) == ""


@pytest.mark.soak
@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_beyond_the_list(name):
    assert let_past(name, listed=False) == ""


# ---- what is said ----------------------------------------------------------------------------------------


def test_both_budgets_and_the_measure_of_them():
    answer = check.place_checkpoints(lambda model: recompute.recompute(model.layers.values()), seed=1)
    assert str(answer).splitlines() == [
        "✗ place_checkpoints: too much is computed again",
        "  the step holds 0.20 × as much as before (0.07 × when backward begins); the budget is 0.40 ×",
        "  1.00 × the layers' forward is computed again; the budget is 0.50 ×",
        "  → Which operations are expensive to compute, and which only expensive to keep?",
        "  (for the same numbers again: seed=1)",
    ]


def test_what_is_kept_is_what_the_table_says():
    """0.07 as backward begins: of each token D for each of 8 layers; before, 9D + 2KE + H + 4F + 2; and the head."""
    D, KE, H, F, V = 64, 32, 4, 160, 32
    head = D + V + 2 * D + 1 + D  # input and logarithms, the last norm and its output, x
    kept, before = 8 * D + head, 8 * (9 * D + 2 * KE + H + 4 * F + 2) + head
    assert kept / before == pytest.approx(0.07, abs=0.01)


def test_a_result_that_is_thrown_away_is_spoken_of():
    answer = check.place_checkpoints(lambda model: torch.nn.Identity())
    assert answer.mistake == "nothing is recomputed"
    assert "returned a Identity; what counts is the model that it was given" in answer.text


def test_the_random_numbers_are_named_only_where_they_matter():
    """Without dropout all is right; the text names the case."""
    answer = check.checkpoint(partial(torchs, use_reentrant=False, preserve_rng_state=False))
    assert answer.mistake == "the random numbers are not kept"
    assert ", dropout: " in answer.text and "gradients differ, first that of" in answer.text


def test_what_it_raises_is_told_with_its_line():
    def fn(model):
        recompute.recompute(model.layers)

    answer = check.place_checkpoints(fn)
    assert answer.text.startswith(
        "on one rank, rank 0 of 1 failed: TypeError: recompute() takes modules, not '0': for a ModuleDict"
    )
    assert "in recompute:   raise TypeError(" in answer.text


def test_the_same_seed_gives_the_same_answer():
    def fn(layer, x):
        return layer(itself(x) * 1.5)

    first, again, other = (check.checkpoint(fn, seed=seed) for seed in (5, 5, 6))
    assert str(first) == str(again) and first.text != other.text
