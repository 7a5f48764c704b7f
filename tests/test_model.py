"""Tests of the GPT against its sources' formulas, written out a second time in float64, without fused kernels.

They use softmax over an explicit mask, keys and values repeated head by head, and rotations as complex numbers. Llama's
parameter counts are those of the published checkpoints. Properties without a formula follow from their definition:
logits do not see the future, weights depend on (seed, name) alone.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from labs.data import Batches, corpus
from labs.model import GPT, PRESETS, Config, initialise, parameters

TINY = PRESETS["tiny"]
# Every size is different, so that no axis can be mistaken for another.
ODD = Config(vocab=11, dim=24, depth=2, heads=4, kv_heads=2, hidden=14, context=7)


def tokens_of(config: Config, batch: int = 3, time: int = 5) -> torch.Tensor:
    return torch.randint(config.vocab, (batch, time), generator=torch.Generator().manual_seed(1))


def written_out(weights: dict, config: Config, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Return logits_BTV by the formulas; `weights` is a state_dict in float64."""
    x = weights["embed.weight"][tokens_BT]
    for i in range(config.depth):
        own = {name.removeprefix(f"layers.{i}."): weight for name, weight in weights.items()}
        x = x + attention(own, config, normalised(x, own["attention_norm.weight"]))
        y = normalised(x, own["mlp_norm.weight"])
        gate, up = y @ own["mlp.gate.weight"].T, y @ own["mlp.up.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ own["mlp.down.weight"].T
    return normalised(x, weights["norm.weight"]) @ weights["head.weight"].T


def normalised(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * gain


def attention(own: dict, config: Config, x_BTD: torch.Tensor) -> torch.Tensor:
    time, size = x_BTD.shape[1], config.head_size
    past = torch.ones(time, time).tril().bool()
    outputs = []
    for head in range(config.heads):
        group = head // (config.heads // config.kv_heads)
        q, k, v = (
            x_BTD @ own[f"attention.{name}.weight"][i * size : (i + 1) * size].T
            for name, i in (("q", head), ("k", group), ("v", group))
        )
        q, k = turned(q, config.rope_base), turned(k, config.rope_base)
        scores = torch.where(past, q @ k.transpose(1, 2) / math.sqrt(size), -math.inf).exp()
        outputs.append(scores / scores.sum(-1, keepdim=True) @ v)
    return torch.cat(outputs, -1) @ own["attention.o.weight"].T


def turned(x_BTE: torch.Tensor, base: float) -> torch.Tensor:
    first, second = x_BTE.chunk(2, dim=-1)
    time, pairs = first.shape[-2:]
    angles = [[t * base ** (-i / pairs) for i in range(pairs)] for t in range(time)]
    angles = torch.tensor(angles, dtype=x_BTE.dtype)
    z = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((z.real, z.imag), -1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_loss_are_those_of_the_formulas(kv_heads, tied):
    config = replace(ODD, kv_heads=kv_heads, tied=tied)
    model = GPT(config, seed=3).double()
    # Gains of one would hide a gain that is not applied.
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.uniform_(0.5, 2, generator=torch.Generator().manual_seed(len(name)))
    tokens = tokens_of(config)
    expected = written_out(model.state_dict(), config, tokens)
    assert torch.allclose(model(tokens), expected, rtol=0, atol=1e-12)

    targets = tokens.roll(1, 1)
    log_p = expected.log_softmax(-1).gather(-1, targets[..., None])
    loss = model(tokens, targets)
    assert loss.shape == () and torch.allclose(loss, -log_p.mean(), rtol=0, atol=1e-12)


def test_logits_do_not_see_the_future():
    model, tokens = GPT(ODD).double(), tokens_of(ODD)
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % ODD.vocab
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :3], after[:, :3])
    assert (before[:, 3:] != after[:, 3:]).any(-1).all()


@pytest.mark.parametrize(
    ("preset", "count"),
    [("llama3-8b", 8_030_261_248), ("llama3-70b", 70_553_706_496), ("llama3-405b", 405_853_388_800)],
)
def test_llama_shapes_have_the_published_number_of_parameters(preset, count):
    assert parameters(PRESETS[preset]) == count


def test_small_presets_are_as_large_as_said():
    assert {name: parameters(PRESETS[name]) for name in ("tiny", "small", "medium")} == {
        "tiny": 205_376,
        "small": 803_968,
        "medium": 75_909_888,
    }


def test_tied_embeddings_are_one_parameter():
    model = GPT(replace(ODD, tied=True))
    assert model.head.weight is model.embed.weight
    assert parameters(ODD) - parameters(replace(ODD, tied=True)) == ODD.vocab * ODD.dim
    model(tokens_of(ODD), tokens_of(ODD)).backward()
    # Rows that are no input still get a gradient, from the head.
    unread = sorted(set(range(ODD.vocab)) - set(tokens_of(ODD).flatten().tolist()))
    assert unread and model.embed.weight.grad[unread].abs().sum(-1).gt(0).all()


def test_weights_depend_on_seed_and_name_alone():
    model = GPT(ODD, seed=5)
    torch.manual_seed(99)
    again, other = GPT(ODD, seed=5), GPT(ODD, seed=6)
    deeper = GPT(replace(ODD, depth=4), seed=5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        assert torch.equal(parameter, deeper.get_parameter(name))
        assert name.endswith("norm.weight") or not torch.equal(parameter, other.get_parameter(name))
    first, second = model.layers["0"], model.layers["1"]
    assert not torch.equal(first.mlp.gate.weight, second.mlp.gate.weight)


def test_a_stage_of_a_pipeline_starts_from_the_whole_models_weights():
    whole = GPT(ODD, seed=5)
    with torch.device("meta"):
        stage = GPT(ODD)
    del stage.layers["0"], stage.embed
    stage.to_empty(device="cpu")
    initialise(stage, seed=5)
    held = stage.state_dict()
    assert held and all(torch.equal(weight, whole.state_dict()[name]) for name, weight in held.items())


def test_float64_starts_from_the_same_numbers_as_float32():
    torch.set_default_dtype(torch.float64)
    try:
        model = GPT(ODD)
    finally:
        torch.set_default_dtype(torch.float32)
    assert model.head.weight.dtype == torch.float64
    assert torch.equal(model.head.weight, GPT(ODD).head.weight.double())


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_spread_of_the_weights_follows_the_width(dim):
    model = GPT(replace(ODD, dim=dim, hidden=2 * dim, vocab=256))
    layer = model.layers["0"]
    for weight, expected in (
        (model.embed.weight, (3 * dim) ** -0.5),
        (layer.attention.q.weight, (3 * dim) ** -0.5),
        (layer.attention.o.weight, (3 * dim) ** -0.5 / 10),
        (layer.mlp.down.weight, (6 * dim) ** -0.5 / 10),
    ):
        assert math.isclose(weight.std().item(), expected, rel_tol=0.05)
    assert torch.equal(layer.mlp_norm.weight, torch.ones(dim))


def test_every_parameter_has_a_gradient_from_the_first_step_on():
    model = GPT(TINY)
    model(tokens_of(TINY), tokens_of(TINY)).backward()
    assert all(parameter.grad.abs().max() > 1e-6 for parameter in model.parameters())


def test_there_are_no_buffers():
    assert not list(GPT(ODD).buffers())


def test_bfloat16_is_close_and_its_loss_is_float32():
    tokens = tokens_of(ODD)
    exact, short = GPT(ODD), GPT(ODD).bfloat16()
    assert short(tokens).dtype == torch.bfloat16 and short(tokens, tokens).dtype == torch.float32
    assert torch.allclose(short(tokens).float(), exact(tokens), atol=0.03)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(exact(tokens, tokens), short(tokens, tokens), atol=0.03)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_shapes_flow_without_memory(kind):
    with torch.device("meta") if kind == "meta" else FakeTensorMode():
        model = GPT(TINY)
        tokens = torch.zeros(2, 9, dtype=torch.long)
        assert model(tokens).shape == (2, 9, TINY.vocab)
        model(tokens, tokens).backward()
    assert all(p.grad.shape == p.shape and p.grad.device == p.device for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 66}, "dim 66 is not divisible by 4 heads"),
        ({"kv_heads": 3}, "4 heads are not divisible by 3 kv_heads"),
        ({"kv_heads": 8}, "4 heads are not divisible by 8 kv_heads"),
        ({"dim": 12}, r"head size 3 \(dim 12 / 4 heads\) is odd"),
        ({"depth": 0}, "depth is 0: it must be positive"),
        ({"heads": 0}, "heads is 0: it must be positive"),
        ({"context": -1}, "context is -1: it must be positive"),
    ],
)
def test_impossible_shapes_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(TINY, **change)


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(ValueError, match="8 tokens are more than the context of 7: shorten them, or"):
        GPT(ODD)(tokens_of(ODD, time=8))


def test_it_learns_more_than_byte_frequencies_in_thirty_steps():
    text = corpus()
    batches = Batches(text.tokens, batch=8, context=TINY.context)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    threads, losses = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for step in range(30):
            loss = model(*batches[step])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    finally:
        torch.set_num_threads(threads)
    assert abs(losses[0] - math.log(TINY.vocab)) < 0.5
    # Windows of the first epoch are all new: the loss before the update is that of unseen text.
    assert sum(losses[-5:]) / 5 < text.unigram_entropy() - 0.1
