"""Tests of labs.generate against the whole model run anew for every token, and of frequencies against the softmax.

Storages show what the caches hold, the recorder what ranks send. Both are exactly what `labs.cost` says.
"""

import re
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import cost
from labs.generate import CachedCore, cached, choose, generate, last_position
from labs.kit.launch import run
from labs.kit.record import mark
from labs.mesh import Mesh
from labs.model import GPT, Config
from labs.tp import gpt_plan, parallelize

# Every size is different, so that no axis can be mistaken for another.
ODD = Config(vocab=23, dim=48, depth=3, heads=4, kv_heads=2, hidden=20, context=30)
PROMPT = torch.randint(ODD.vocab, (3, 5), generator=torch.Generator().manual_seed(1))


def sharpened(config=ODD):
    """Return a model whose choices are clear: the spread of its logits is far beyond rounding."""
    model = GPT(config, seed=3).double()
    model.head.weight.data *= 20
    return model


def anew(model, prompt, count, temperature=0.0, seed=0):
    """Generate with all tokens through the model for each new one."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        with torch.no_grad():
            last = model(prompt)[:, -1]
        prompt = torch.cat((prompt, choose(last, temperature, generator)), 1)
    return prompt


# ---- one device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_are_those_of_the_whole_sequence_however_it_comes(kv_heads):
    model = sharpened(replace(ODD, kv_heads=kv_heads))
    tokens = torch.randint(ODD.vocab, (2, 9), generator=torch.Generator().manual_seed(2))
    expected = model(tokens)
    for sizes in ([9], [1] * 9, [4, 1, 3, 1], [1, 8]):
        with cached(model, 9) as caches:
            logits = torch.cat([model(part) for part in tokens.split(sizes, 1)], 1)
            assert [cache.past for cache in caches] == [9] * ODD.depth
        assert torch.allclose(logits, expected, rtol=0, atol=1e-12), sizes


@pytest.mark.parametrize("temperature", [0.0, 0.7, 5.0])
def test_tokens_are_those_of_a_model_without_a_cache(temperature):
    model = sharpened()
    expected = anew(model, PROMPT, 12, temperature, seed=4)
    assert expected[:, 5:].unique().numel() > 3
    assert torch.equal(generate(model, PROMPT, 12, temperature, seed=4), expected)
    assert torch.equal(generate(model.float(), PROMPT, 12, temperature, seed=4), expected)


def test_a_seed_is_a_choice_and_the_prompt_stays():
    model, prompt = sharpened(), PROMPT.clone()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first, again, other = (generate(model, prompt, 20, 5.0, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(first[:, :5], PROMPT) and torch.equal(prompt, PROMPT)
    assert torch.equal(torch.get_rng_state(), state)


def test_one_token_and_all_that_the_context_has_room_for():
    model = sharpened()
    assert generate(model, PROMPT, 1).shape == (3, 6)
    assert torch.equal(generate(model, PROMPT[:1, :1], 29), anew(model, PROMPT[:1, :1], 29))


def test_draws_are_as_frequent_as_the_softmax_says():
    logits, draws, temperature = torch.tensor([0.3, -1.0, 2.0, 0.9]), 20_000, 1.7
    tokens = choose(logits.expand(draws, 4), temperature, torch.Generator().manual_seed(0))
    share = tokens.flatten().bincount() / draws
    expected = (logits / temperature).softmax(0)
    assert ((share - expected).abs() < 4 * (expected / draws).sqrt()).all()


@pytest.mark.parametrize("temperature", [1e-300, 1e-3])
def test_little_warmth_is_hardly_a_choice(temperature):
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]])
    assert choose(logits, temperature, torch.Generator().manual_seed(0)).tolist() == [[2]]


# ---- memory, during and after ----------------------------------------------------------------------------


def held(caches):
    storages = (tensor.untyped_storage() for cache in caches for tensor in (cache.keys_BKTE, cache.values_BKTE))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_the_cache_holds_what_was_predicted_from_the_first_call_on():
    model = sharpened()
    with cached(model, 12) as caches:
        for part in (PROMPT, PROMPT[:, :1]):
            model(part)
            assert held(caches) == cost.kv_cache(ODD, 12, batch=3, itemsize=8)


def test_nothing_is_left_of_it():
    model = sharpened()
    names, cores = [name for name, _ in model.named_modules()], list(model.modules())
    with cached(model, 6) as caches:
        model(PROMPT)
        gone = [weakref.ref(cache) for cache in caches]
        del caches
    assert [ref() for ref in gone] == [None] * ODD.depth
    model.layers["0"].register_forward_pre_hook(fail_for_one_token)
    with pytest.raises(RuntimeError, match="in the middle"):
        generate(model, PROMPT, 3)
    assert [name for name, _ in model.named_modules()] == names and list(model.modules()) == cores
    assert model(PROMPT).shape == (3, 5, ODD.vocab), "logits of all positions again"
    assert torch.is_grad_enabled() and not model.state_dict().keys() - dict(model.named_parameters()).keys()


def fail_for_one_token(layer, inputs):
    if inputs[0].shape[1] == 1:
        raise RuntimeError("in the middle")


def test_training_continues_after_it_as_if_nothing_had_happened():
    model, other = sharpened(), sharpened()
    generate(model, PROMPT, 4)
    for each in (model, other):
        each(PROMPT, PROMPT).backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), other.parameters(), strict=True))


# ---- split over ranks ------------------------------------------------------------------------------------

SHAPES = {
    2: replace(ODD, heads=6, kv_heads=3),  # two heads of keys and values on one rank, one on the other
    3: replace(ODD, heads=6, kv_heads=3, tied=True),
    4: ODD,  # each of two heads of keys and values on two ranks
}


def on_ranks(config):
    """Return tokens at two temperatures, and what the caches hold of a prompt and a token by hand."""
    ranks, rank, found = dist.get_world_size(), dist.get_rank(), []
    model = parallelize(sharpened(config), Mesh((ranks,), ("tp",)), gpt_plan(config))
    for temperature in (0.0, 0.7):
        found.append(generate(model, PROMPT, 12, temperature, seed=4).tolist())
    with cached(model, 16) as caches, last_position(model):
        for tokens in (PROMPT, PROMPT[:, :1]):
            mark("step")
            model(tokens)
        mark("end")
        return found, held(caches) == cost.kv_cache(config, 16, batch=3, ranks=ranks, itemsize=8, rank=rank)


@pytest.mark.parametrize("ranks", SHAPES)
def test_a_split_model_generates_the_same_and_holds_and_sends_what_was_predicted(ranks):
    config = SHAPES[ranks]
    expected = [anew(sharpened(config), PROMPT, 12, temperature, seed=4).tolist() for temperature in (0.0, 0.7)]
    results = run(on_ranks, config, ranks=ranks, record="communication")
    for rank, (found, as_predicted) in enumerate(results):
        assert found == expected and as_predicted
        for step, tokens in enumerate((5, 1)):
            sent = cost.token_sent(config, ranks, rank, batch=3, tokens=tokens)
            assert results.recording.sent(rank, step=step) == 8 * sent.elements
            assert results.recording.counts(rank, step=step) == {"all_reduce": 7, "all_gather": 1}


# ---- bad input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        ({"model": nn.Linear(2, 2)}, TypeError, "generate() takes a GPT, not a Linear: if it is wrapped, give"),
        ({"prompt_BT": [1, 2]}, ValueError, "the prompt is [1, 2]: it must be int64 in the shape [batch, tokens]"),
        ({"prompt_BT": PROMPT[0]}, ValueError, "the prompt is torch.int64 (5,): it must be int64 in the shape"),
        ({"prompt_BT": PROMPT.float()}, ValueError, "the prompt is torch.float32 (3, 5): it must be int64"),
        ({"prompt_BT": PROMPT[:, :0]}, ValueError, "the prompt of shape (3, 0) is empty: give at least one"),
        ({"prompt_BT": PROMPT[:0]}, ValueError, "the prompt of shape (0, 5) is empty"),
        ({"prompt_BT": PROMPT + 20}, ValueError, "the vocabulary of 23 ends at 22"),
        ({"prompt_BT": PROMPT - 23}, ValueError, "the prompt has token -2"),
        ({"count": 0}, ValueError, "count is 0: ask for 1 token at least"),
        ({"count": 26}, ValueError, "5 tokens and 26 more are 31, and the context is 30: ask for fewer tokens, or"),
        ({"temperature": -0.5}, ValueError, "temperature is -0.5: it must be 0, for the likeliest token, or positive"),
        ({"temperature": float("nan")}, ValueError, "temperature is nan: it must be"),
        ({"temperature": float("inf")}, ValueError, "temperature is inf: it must be"),
    ],
)
def test_what_cannot_be_generated_is_refused(given, kind, said):
    with pytest.raises(kind, match=re.escape(said)) as raised:
        generate(**{"model": GPT(ODD), "prompt_BT": PROMPT, "count": 3} | given)
    assert "\n" not in str(raised.value)


def test_a_cache_that_is_full_or_of_another_batch_says_so():
    model = GPT(ODD)
    with cached(model, 6):
        model(PROMPT)
        with pytest.raises(ValueError, match="3 x 2 tokens do not fit the cache, which has 3 x 5 and room for 6"):
            model(PROMPT[:, :2])
        with pytest.raises(ValueError, match="1 x 1 tokens do not fit the cache, which has 3 x 5"):
            model(PROMPT[:1, :1])
    assert not any(isinstance(module, CachedCore) for module in model.modules())
