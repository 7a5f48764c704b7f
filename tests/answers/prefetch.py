"""Answers to prefetch (06): one layer ahead of the one that computes."""

from collections import deque

from tests.answers import Exercise

answers = Exercise("prefetch")
LINE = (
    "each layer but the first was under way while the one before it computed, and you held 2 layers at "
    "most; without prefetch 1, with it 2 is the least possible"
)


# ---- right -----------------------------------------------------------------------------------------------


@answers.right(line=LINE, blind=True)
def ahead(layers, compute):
    layers[0].gather()
    for i, layer in enumerate(layers):
        layer.arrive()
        if i + 1 < len(layers):
            layers[i + 1].gather()
        compute(layer)
        layer.drop()


@answers.right(line=LINE)
def two_at_the_start(layers, compute):
    for layer in layers[:2]:
        layer.gather()
    for place, layer in enumerate(layers):
        layer.arrive()
        compute(layer)
        layer.drop()
        for following in layers[place + 2 : place + 3]:
            following.gather()


@answers.right(line=LINE)
def one_for_the_rest(layers, compute):
    """Again and again: the first one, with the second under way."""
    if not layers:
        return
    first, *others = layers
    first.gather()
    first.arrive()
    if others:
        others[0].gather()
    compute(first)
    first.drop()
    one_for_the_rest(others, compute)


@answers.right(blind=True)
def pf_iterator(layers, compute):
    coming = iter(layers)
    now = next(coming, None)
    if now is None:
        return
    now.gather()
    for following in coming:
        now.arrive()
        following.gather()
        compute(now)
        now.drop()
        now = following
    now.arrive()
    compute(now)
    now.drop()


@answers.right(blind=True)
def pf_deque(layers, compute):
    waiting, here = deque(layers), deque()
    while waiting or here:
        while waiting and len(here) < 2:
            here.append(waiting.popleft())
            here[-1].gather()
        here[0].arrive()
        compute(here[0])
        here.popleft().drop()


@answers.right(blind=True)
def pf_late_drop(layers, compute):
    """Waits for the next one first, and drops then."""
    if not layers:
        return
    layers[0].gather()
    layers[0].arrive()
    for i, layer in enumerate(layers):
        if i + 1 < len(layers):
            layers[i + 1].gather()
        compute(layer)
        if i + 1 < len(layers):
            layers[i + 1].arrive()
        layer.drop()


FIRST = "    layers[0].gather()\n"
ARRIVE = "        layer.arrive()\n"
NEXT = "        if i + 1 < len(layers):\n            layers[i + 1].gather()\n"
COMPUTE = "        compute(layer)\n"
DROP = "        layer.drop()\n"
WANTED = "        for wanted in layers[i : i + 2]:\n            wanted.gather()\n"

answers.vary(ahead, {ARRIVE: "", NEXT: NEXT + ARRIVE}, line=LINE, blind=True)
# Asks for each layer when it is needed, too: nothing happens where it is on its way.
answers.vary(ahead, {FIRST: "", ARRIVE: WANTED + ARRIVE, NEXT: ""}, blind=True)

# ---- wrong: sent for too late, or too early --------------------------------------------------------------

NOTHING = "nothing is in flight while a layer computes"
EARLY = "computed before it was there"
NOT_ALL = "layers left out, or in another order"
LATE = "some gathers come late"

spoil = answers.slips(ahead)
spoil(NOTHING, {FIRST: "", ARRIVE: f"        layer.gather()\n{ARRIVE}", NEXT: ""}, blind=True)
spoil(NOTHING, {NEXT: "", COMPUTE: COMPUTE + NEXT}, blind=True)
spoil("every layer is held", {FIRST: "    for each in layers:\n        each.gather()\n", NEXT: ""}, blind=True)
spoil("every layer is held", DROP, f"    for layer in layers:\n{DROP}", blind=True)
spoil("three layers at a time", {FIRST: "", ARRIVE: WANTED.replace("2", "3") + ARRIVE, NEXT: ""}, blind=True)
spoil(
    "three layers at a time",
    {NEXT: f"{NEXT}        if i:\n            layers[i - 1].drop()\n", DROP: "    layers[-1].drop()\n"},
    blind=True,
)
spoil(
    "waited for before it is needed",
    {FIRST: f"{FIRST}    layers[0].arrive()\n", ARRIVE: "", NEXT: f"{NEXT}            layers[i + 1].arrive()\n"},
    blind=True,
)
spoil(LATE, {NEXT: NEXT.replace("i + 1 <", "i % 2 == 0 and i + 1 <"), ARRIVE: "        layer.gather()\n" + ARRIVE})
spoil(
    NOTHING,
    {NEXT: NEXT.replace("len(layers)", "len(layers) - 1"), ARRIVE: "        layer.gather()\n" + ARRIVE},
    blind=True,
)


@answers.wrong(LATE, blind=True)
def pfw_pairs(layers, compute):
    """Two by two: the first of each pair is not under way."""
    for i in range(0, len(layers), 2):
        pair = layers[i : i + 2]
        for layer in pair:
            layer.gather()
        for layer in pair:
            layer.arrive()
            compute(layer)
            layer.drop()


# ---- wrong: not there, or not dropped --------------------------------------------------------------------

ONCE = "right only where no layer comes twice"
FREED = "full parameters are never freed"

spoil(EARLY, ARRIVE, "", blind=True)
spoil(EARLY, COMPUTE + DROP, DROP + COMPUTE, blind=True)
spoil(FREED, DROP, f"        if i + 1 < len(layers):\n    {DROP}", blind=True)
spoil(ONCE, DROP, f"        if layer not in layers[i + 1 :]:\n    {DROP}", blind=True)
AROUND = "        layers[(i + 1) % len(layers)].gather()\n"
spoil("gathered for nothing", NEXT, f"        if layers[(i + 1) % len(layers)] is not layer:\n    {AROUND}")
spoil("gathered for nothing", {ARRIVE: AROUND + ARRIVE, NEXT: ""}, blind=True)
spoil("", NEXT, "        layers[i + 1].gather()\n", blind=True)
spoil(ONCE, ARRIVE, f"        i = layers.index(layer)\n{ARRIVE}", blind=True)
spoil(
    ONCE,
    {
        FIRST: f"    seen = {{id(layers[0])}}\n{FIRST}",
        NEXT: "        if i + 1 < len(layers) and id(layers[i + 1]) not in seen:\n"
        "            seen.add(id(layers[i + 1]))\n            layers[i + 1].gather()\n",
    },
    blind=True,
)
spoil(
    "",
    {
        FIRST: f"{FIRST}    layers[1].gather()\n",
        NEXT: "",
        DROP: f"{DROP}        if i + 2 < len(layers):\n            layers[i + 2].gather()\n",
    },
    blind=True,
)

# ---- wrong: which layers ---------------------------------------------------------------------------------

spoil(NOT_ALL, FIRST, f"    layers = layers[:-1] or layers\n{FIRST}")
spoil(ONCE, FIRST, f"    layers = list(dict.fromkeys(layers))\n{FIRST}", blind=True)
spoil(NOT_ALL, COMPUTE, f"        if i + 1 < len(layers):\n    {COMPUTE}", blind=True)
spoil(
    "the list of layers has changed",
    {
        FIRST: f"    layers.append(None)\n{FIRST}",
        "enumerate(layers)": "enumerate(layers[:-1])",
        NEXT: NEXT.replace("i + 1 < len(layers)", "layers[i + 1]"),
    },
    blind=True,
)


@answers.wrong("the list of layers has changed", blind=True)
def pfw_pops(layers, compute):
    now = layers.pop(0)
    now.gather()
    while now is not None:
        now.arrive()
        after = layers.pop(0) if layers else None
        if after is not None:
            after.gather()
        compute(now)
        now.drop()
        now = after
