"""Answers to prefetching (06): hooks that gather one layer ahead of the one that computes, there and back."""

from tests.answers import Exercise, from_notebook

answers = Exercise("prefetching")
LINE = (
    "there and back, each layer but the first was on its way while the one before it computed; each was gathered once "
    "for each time, and at most 2 were held"
)


# ---- right -----------------------------------------------------------------------------------------------

prefetching = answers.right(from_notebook("prefetching"), line=LINE)


@answers.right(line=LINE)
def places(model):
    """Prefetch by a counter of layers; in backward, hooks on outputs move it after fully_shard's own hooks."""
    layers, at = list(model), 0

    def start(*_):
        nonlocal at
        at = 0

    def forward(layer, _):
        if at + 1 < len(layers):
            layers[at + 1].unshard(async_op=True)

    def backward(place):
        def hook(gradient):
            if place:
                layers[place - 1].unshard(async_op=True)

        return hook

    def after(layer, given, output):
        nonlocal at
        if output.requires_grad:
            output.register_hook(backward(at))
        at += 1

    model.register_forward_pre_hook(start)
    for layer in dict.fromkeys(layers):
        layer.register_forward_pre_hook(forward)
        layer.register_forward_hook(after)


# ---- wrong -----------------------------------------------------------------------------------------------

NOTHING = "nothing is on its way while a layer computes"
VAIN = "gathered in vain"
ONCE = "right only where no layer comes twice"
SOON = "        for soon in (layer, *uses[:1]):\n            soon.unshard(async_op=True)\n"
BACK = "[*model, *reversed(model)]"

spoil = answers.slips(prefetching)
spoil("the later one is gathered first", "(layer, *uses[:1])", "uses[:1]")
spoil("waited for before it is needed", "async_op=True", "")
spoil(NOTHING, "(layer, *uses[:1])", "[layer]")
spoil("three layers at a time", "uses[:1]", "uses[:2]")
spoil(
    "every layer is held",
    {
        "uses[:] = " + BACK: "uses[:] = "
        + BACK
        + "\n        for layer in model:\n            layer.unshard(async_op=True)"
    },
)
spoil("backward goes in forward's order", BACK, "[*model, *model]")
spoil(
    "a hook returns something",
    SOON,
    "        return [soon.unshard(async_op=True) for soon in (layer, *uses[:1])][-1]\n",
)


def by_neighbours(model):
    layers = list(model)
    for i, layer in enumerate(layers):

        def ahead(layer, *_, following=layers[i + 1 : i + 2]):
            for each in following:
                each.unshard(async_op=True)

        def back(layer, *_, i=i):
            for each in (layer, *layers[max(i - 1, 0) : i]):
                each.unshard(async_op=True)

        layer.register_forward_pre_hook(ahead)
        layer.register_full_backward_pre_hook(back)


answers.wrong(ONCE)(by_neighbours)
neighbours = answers.slips(by_neighbours)
neighbours(VAIN, "*layers[max(i - 1, 0) : i]", "layers[i - 1]")
neighbours(
    "right only where no layer is frozen",
    "        layer.register_full_backward_pre_hook(back)\n",
    "        if all(p.requires_grad for p in layer.parameters()):\n"
    "            layer.register_full_backward_pre_hook(back)\n",
)
neighbours("some gathers come late", "layers[i + 1 : i + 2]", "layers[i + 1 : i + 2] if i % 2 else []")


@answers.wrong("it is not your hooks that gather ahead")
def told(model):
    layers = list(model)
    for i, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 2])
        layer.set_modules_to_backward_prefetch(layers[max(i - 1, 0) : i])


@answers.wrong("other numbers")
def scaled(model):
    """Double each gradient: autograd takes what a hook returns in the gradient's place."""
    prefetching(model)
    for layer in set(model):
        layer.register_full_backward_pre_hook(lambda layer, gradients: tuple(2 * each for each in gradients))


@answers.wrong(NOTHING)
def nothing(model):
    pass
