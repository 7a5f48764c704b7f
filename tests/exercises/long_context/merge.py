"""Answers to merge (12): two parts of a softmax."""

import torch
import torch.nn.functional as F

from tests.answers import Exercise

answers = Exercise("merge")


@answers.right(line="2 to 5 parts are one softmax")
def by_logaddexp(a, b):
    (o_a, l_a), (o_b, l_b) = a, b
    log = torch.logaddexp(l_a, l_b)
    w_a, w_b = torch.exp(l_a - log), torch.exp(l_b - log)
    output = w_a[..., None] * o_a + w_b[..., None] * o_b
    return output, log


@answers.right
def by_the_largest(a, b):
    largest = torch.maximum(a[1], b[1])
    w_a, w_b = (a[1] - largest).exp(), (b[1] - largest).exp()
    output = (w_a.unsqueeze(-1) * a[0] + w_b.unsqueeze(-1) * b[0]) / (w_a + w_b).unsqueeze(-1)
    return [output, largest + (w_a + w_b).log()]


@answers.right
def by_softmax(a, b):
    outputs, logs = map(torch.stack, zip(a, b, strict=True))
    return (logs.softmax(0)[..., None] * outputs).sum(0), logs.logsumexp(0)


spoil = answers.slips(by_logaddexp)
WEIGHTS, OUTPUT = "torch.exp(l_a - log), torch.exp(l_b - log)", "w_a[..., None] * o_a + w_b[..., None] * o_b"
spoil("all parts count alike", OUTPUT, "(o_a + o_b) / 2")
spoil("the outputs are added", OUTPUT, "o_a + o_b")
spoil("weighed by the logarithms", WEIGHTS, "l_a / (l_a + l_b), l_b / (l_a + l_b)")
spoil("the weights are exchanged", "w_a, w_b", "w_b, w_a")
spoil("not divided by the sum of both", WEIGHTS, WEIGHTS.replace("log", "torch.maximum(l_a, l_b)"))
spoil("not divided by the sum of both", WEIGHTS, "l_a.exp(), l_b.exp()")
spoil("the log-sum-exp of one part", "output, log", "output, torch.maximum(l_a, l_b)")
spoil("the log-sum-exp of one part", "output, log", "output, l_b")
spoil("the logarithms are added", "output, log", "output, l_a + l_b")
spoil("a weight along the head's width", "w_a[..., None]", "w_a")
spoil("right only for small scores", WEIGHTS, "l_a.exp() / log.exp(), l_b.exp() / log.exp()")
spoil("right only for small scores", "torch.logaddexp(l_a, l_b)", "(l_a.exp() + l_b.exp()).log()")
spoil("what was given has changed", "return", "o_a.zero_()\n    return")


@answers.wrong("right only where each query sees a key of both parts")
def by_sigmoid(a, b):
    (o_a, l_a), (o_b, l_b) = a, b
    return o_a - torch.sigmoid(l_b - l_a)[..., None] * (o_a - o_b), l_a - F.logsigmoid(l_a - l_b)


@answers.wrong("right only where each query sees a key of both parts")
def the_part_that_is_seen(a, b):
    lowest = torch.finfo(a[1].dtype).min
    if (a[1] == lowest).all() or (b[1] == lowest).all():
        return a if (b[1] == lowest).all() else b
    return by_logaddexp(a, b)
