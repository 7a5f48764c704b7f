"""Tests of labs.moe.router against formulas written out for one token at a time."""

import torch

from labs.moe import SCORES, Router, balance_biases

TOKENS, DIM, EXPERTS, K = 9, 5, 6, 3


def router(scores, is_biased=False, top_k=K):
    torch.manual_seed(0)
    return Router(DIM, EXPERTS, top_k, scores, is_biased).double()


def tokens(n=TOKENS):
    return torch.randn(n, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def by_hand(logits, scores):
    """Return the experts and weights of one token."""
    best = sorted(sorted(range(EXPERTS), key=lambda e: -logits[e])[:K])
    grown = [x.exp() for x in logits]
    match scores:
        case "softmax before top-k":
            weights = [grown[e] / sum(grown) for e in best]
        case "softmax after top-k":
            weights = [grown[e] / sum(grown[b] for b in best) for e in best]
        case "sigmoid":
            each = [grown[e] / (1 + grown[e]) for e in best]
            weights = [x / sum(each) for x in each]
    return best, weights


def test_each_token_gets_its_best_experts_in_order_with_their_weights():
    x = tokens()
    for scores in SCORES:
        its = router(scores)
        chosen, weights = its(x)
        for token, logits in enumerate(its.gate(x)):
            best, expected = by_hand(logits, scores)
            assert chosen[token].tolist() == best, scores
            assert torch.allclose(weights[token], torch.stack(expected), atol=1e-14), scores


def test_the_balance_loss_is_one_if_all_experts_are_alike_and_grows_with_the_favourite():
    its, x = router("softmax before top-k"), tokens()
    chosen, _ = its(x)
    shares = its.gate(x).softmax(-1)
    f = [sum(e in row for row in chosen.tolist()) / (K * TOKENS) for e in range(EXPERTS)]
    assert torch.allclose(its.take_balance_loss(), EXPERTS * (torch.tensor(f).double() * shares.mean(0)).sum())
    its(x)
    its.take_balance_loss().backward()
    before = shares.mean(0)
    with torch.no_grad():
        its.gate.weight -= 0.1 * its.gate.weight.grad
    after = its.gate(x).softmax(-1).mean(0)
    assert torch.tensor(f).double() @ after < torch.tensor(f).double() @ before
    torch.nn.init.zeros_(its.gate.weight)
    its(x)
    assert torch.allclose(its.take_balance_loss(), torch.ones(()).double())
    its(tokens(0))
    assert its.take_balance_loss() == 0, "no token, no loss"


def test_the_bias_takes_part_in_the_choice_and_not_in_the_weight():
    its, x = router("sigmoid", is_biased=True), tokens()
    its.bias[5] = 10.0
    chosen, weights = its(x)
    assert (chosen[:, -1] == 5).all()
    scores = its.gate(x).sigmoid().gather(-1, chosen)
    assert torch.allclose(weights, scores / scores.sum(-1, keepdim=True))
    assert its.bias.grad is None and not its.bias.requires_grad


def test_balance_biases_evens_the_load_and_counts_anew():
    its = router("sigmoid", is_biased=True)
    with torch.no_grad():
        its.gate.weight[2] += 1.0  # a favourite, for tokens with a positive sum
    x, loads = tokens(200).abs(), []
    for _ in range(60):
        for micro_batch in x.chunk(2):
            its(micro_batch)
        loads.append(its.load_E)
        balance_biases(its, 0.02)
    assert loads[0].max() == 200 and loads[0].min() == 0
    assert loads[-1].max() < 140 and loads[-1].min() > 60, "a mean of 100, around which a fixed rate goes up and down"
    assert loads[-1].sum() == 200 * K
    balance_biases(router("sigmoid"), 0.01)  # without biases there is nothing to do
