# %% [markdown]
# # Collectives
#
# *Four ranks each hold a tensor. How does every one of them come to hold the sum, and what is the least that each must
# send?*
#
# You need: [Start here](00_start_here.ipynb), where a job on several ranks is a function call.
# **Minutes**, by estimate: 40 without exercises, 85 with them, 10 more for optional parts, 30 more for the challenge.
# The machine works for a minute of it, in 1 GB of memory.
#
# First, three questions on earlier notebooks; each run asks different ones. Say the answer aloud before you unfold it.

# %%
from labs.kit import recall

recall.ask("02")

# %% [markdown]
# ## Question
#
# In the next notebook four ranks train copies of one model, each on its own quarter of the batch. Each computes a
# gradient of its own, and before the optimizer steps, all need the mean of the four. But a **rank** is a process with
# memory of its own: it sees nobody else's. All it can do is *send* a tensor to another rank, or *receive* one.
#
# Is that expensive? Here is the gradient of one of today's smaller models, at two bytes per number.

# %%
import math
import time
from functools import partial

import torch
import torch.distributed as dist

from labs import collectives, cost
from labs.collectives import exchange
from labs.kit import beat, check, draw, play
from labs.kit.launch import run
from labs.kit.record import mark
from labs.model import PRESETS

run = partial(run, device="cpu")  # so that whoever reads this gets the same bytes

gradient = 2 * sum(cost.parameter_sizes(PRESETS["llama3-8b"]))
print(f"Llama 3 8B: {gradient:,} bytes of gradient, in every step, on every rank")

# %% [markdown]
# ## Picture
#
# A **collective** is an operation in which all ranks of a group take part. These six, and a `barrier` that moves
# nothing (nobody leaves it before everybody has arrived), are all that this course needs. In the picture, a row is a
# rank; a tensor is cut into as many **pieces** as there are ranks; to **reduce** is to combine what the ranks hold,
# here by adding.
#
# ![Six collectives on four ranks, before and after: broadcast, reduce, all_reduce, all_gather, reduce_scatter and
# all_to_all](../images/collectives.svg)
#
# `all_reduce` is what the question asks for. Now look at the row below it: `reduce_scatter` leaves one piece of the sum
# on each rank, and `all_gather` gives everybody all pieces. One after the other, they are an `all_reduce`. Keep that
# in mind.

# %% [markdown]
# ## Predict
#
# Rank r brings `[10r, 10r + 1, 10r + 2, 10r + 3]`, so each piece is one number. After a `reduce_scatter`, which number
# does rank 2 hold? Type your guess, then run the two cells.

# %%
guess_number = 68  # your number


def glance():
    """What this rank holds after each collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    own = 10 * rank + torch.arange(ranks)
    held = {"before": own.tolist()}
    for name in ("broadcast", "reduce", "all_reduce", "all_gather", "reduce_scatter"):
        x = own.clone()
        piece = getattr(collectives, name)(x)
        held[name] = x.tolist() if piece is None else piece.tolist()
    return held


after = run(glance, ranks=4)
rows = {name: {f"rank {r}": str(x[name]) for r, x in enumerate(after)} for name in after[0]}
draw.table([{"": name, **row} for name, row in rows.items()])

# %%
question = "After reduce_scatter, which number does rank 2 hold?"
check.predict(question, guess_number, after[2]["reduce_scatter"][0], tolerance=0)

# %% [markdown]
# Compare the table with the picture. After `reduce` only rank 0 has the sum; what the others hold is left over from the
# work (partial sums), and not meant to be used. That is what the collectives promise. Now we build them, from send and
# receive alone.

# %% [markdown]
# ## Build: what a rank can do on its own
#
# `send` and `recv` come in pairs: one rank names the destination, the other the source. The receiver provides a tensor
# of the right size and dtype, and the message overwrites it. Every rank runs the *same* function; what it does depends
# on its number.


# %%
def hand_over():
    """Rank 0 tells rank 1 three numbers."""
    if dist.get_rank() == 0:
        dist.send(torch.tensor([1.0, 2.0, 3.0]), dst=1)
    else:
        x = torch.empty(3)
        dist.recv(x, src=0)
        return x.tolist()


assert run(hand_over, ranks=2) == [None, [1.0, 2.0, 3.0]]

# %% [markdown]
# Now let all four send at once, around a ring: each rank sends to the next one, and receives from the one before. Think
# before you run it: who moves first? This cell is *meant* to fail.


# %% tags=["raises-exception"]
def ring_of_sends():
    """Everybody hands a tensor to the next rank; or so it seems."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.ones(4), torch.empty(4)
    dist.send(mine, dst=(rank + 1) % ranks)
    dist.recv(theirs, src=(rank - 1) % ranks)


run(ring_of_sends, ranks=4)

# %% [markdown]
# `send` **blocks**: it does not return before the other side has begun to receive. All four wait in their `send`, and
# nobody ever reaches `recv`. This is a **deadlock**. (Some libraries buffer small messages; with them such a program
# works until the tensor grows.) Elsewhere the job would say nothing until a timeout, many minutes later. Here the
# launcher keeps a record of what every rank waits for, notices the circle, and tells you the line of each rank.
#
# The other classic is a rank that never joins. This cell is meant to fail, too.


# %% tags=["raises-exception"]
def absent():
    """All ranks add up, except one that sees no reason to."""
    x = torch.ones(4)
    if dist.get_rank() != 3:
        dist.all_reduce(x)


run(absent, ranks=4)

# %% [markdown]
# Many jobs hang because a collective stands inside an `if` that tests the rank. The rule: *every rank of a group calls
# the same collectives in the same order.*
#
# And the ring? `isend` and `irecv` (i for *immediate*) only **post** a message: they return at once with a handle to
# wait on. So every rank posts both of its messages, and then waits for both. `exchange` from
# [labs/collectives.py](../labs/collectives.py) does just that; it counts peers modulo N, the number of ranks.


# %%
def ring_of_exchanges():
    """Everybody hands a number to the next rank."""
    rank = dist.get_rank()
    mine, theirs = torch.tensor([rank]), torch.tensor([-1])
    exchange(None, send=(mine, rank + 1), receive=(theirs, rank - 1))
    return theirs.item()


assert run(ring_of_exchanges, ranks=4) == [3, 0, 1, 2]

# %% [markdown]
# One such exchange by all ranks is a **round**. From here on, `exchange` is all that you need. (Its first argument is
# the *group* of ranks that take part; `None` means all.)
#
# ## Build: broadcast, a tree
#
# Rank 0 has a tensor, and eight ranks need it. If rank 0 told them one after another, that would take seven rounds,
# with six ranks idle in each. Better: *whoever knows it tells one more.* The number of ranks that know it doubles in
# each round. A collective seen from above is a list of messages (round, from, to, piece); drag the slider, or press
# play.

# %%
tree, informed = [], [0]
for number in range(3):
    tree += [(number, rank, rank + len(informed), 0) for rank in informed]
    informed += [rank + len(informed) for rank in informed]

assert len(tree) == 7 and informed == list(range(8))
play.collective(tree, ranks=8, held=[{0: {0}}, *[{}] * 7])

# %% [markdown]
# ### Exercise 1: broadcast (15 minutes)
#
# Write what one rank does in one round. `me` is this rank's distance from the root; the root's own is 0. Before the
# round, the ranks with `me < distance` know the tensor. Some tell somebody, some are told, and some do nothing; when N
# is not a power of two, some have nobody left to tell. Peers are `rank ± distance`. (The lines before the loop deal
# with groups and roots; leave them as they are, and hand `group` on to `exchange`.)
#
# Budget: N − 1 messages in all, in ⌈log₂ N⌉ rounds, by `exchange` or by sends and receives of your own, but not by a
# built-in collective; and, as in all exercises here, room for one copy of the tensor. Any tree that keeps to it is
# right.


# %%
def my_broadcast(tensor, src=0, group=None):
    """Every rank's `tensor` (any shape and dtype, in place) becomes a copy of global rank
    `src`'s."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.view(-1)
    me = (rank - dist.get_group_rank(group or dist.group.WORLD, src)) % ranks
    distance = 1
    while distance < ranks:
        ### BEGIN SOLUTION
        if me < distance and me + distance < ranks:
            exchange(group, send=(flat, rank + distance))
        elif distance <= me < 2 * distance:
            exchange(group, receive=(flat, rank - distance))
        ### END SOLUTION
        distance *= 2


check.broadcast(my_broadcast)

# %% [markdown]
# A check runs your function in real jobs, on sizes, groups and types that you did not think of, and measures what you
# sent. `reduce` is the same tree backwards: the leaves begin, and each rank adds what arrives before it passes the sum
# on.
#
# ## Build: the sum, the obvious way
#
# Two ways to do an `all_reduce` come to mind. Everybody sends to rank 0, which adds up and tells everybody the result.
# Or everybody sends to everybody, and each rank adds up for itself.


# %%
def through_rank_0(x):
    """Rank 0 collects, adds up, and tells everybody."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    theirs = torch.empty_like(x)
    if rank == 0:
        for peer in range(1, ranks):
            exchange(None, receive=(theirs, peer))
            x += theirs
        for peer in range(1, ranks):
            exchange(None, send=(x, peer))
    else:
        exchange(None, send=(x, 0))
        exchange(None, receive=(x, 0))


# %%
def everyone_to_everyone(x):
    """All tensors go everywhere, and everybody adds up."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, theirs = x.clone(), torch.empty_like(x)
    for step in range(1, ranks):
        exchange(None, send=(mine, rank + step), receive=(theirs, rank - step))
        x += theirs


def outcome(all_reduce):
    """What a rank has after an all-reduce of the ranks' numbers, with a fraction that floats
    must round."""
    x = dist.get_rank() + torch.arange(8000) / 7
    all_reduce(x)
    return x


for way in through_rank_0, everyone_to_everyone:
    assert torch.allclose(run(outcome, way, ranks=4)[0], 6 + 4 * torch.arange(8000) / 7)

# %% [markdown]
# Both are right. What do they cost? `record="communication"` watches a job from outside and counts every message; the
# tensor here has 8,000 elements of 4 bytes. The table shows what the busiest rank sends, in multiples of this tensor.


# %%
def busiest(all_reduce, ranks):
    """What the rank that sends most sends, in tensors."""
    recording = run(outcome, all_reduce, ranks=ranks, record="communication").recording
    return max(recording.sent(rank) for rank in range(ranks)) / 32_000


def costs(*ways):
    """The busiest rank's share, by way and number of ranks."""
    shares = {way.__name__: {f"{n} ranks": busiest(way, n) for n in (2, 4, 8)} for way in ways}
    return draw.table([{"": name, **each} for name, each in shares.items()])


costs(through_rank_0, everyone_to_everyone)

# %% [markdown]
# N − 1 tensors, either way: from two ranks to eight, seven times as much. Through rank 0, one link carries everything
# while the others idle; everyone to everyone keeps all links busy with the same numbers again and again.
# Can it be done so that the cost does not grow with N? Guess before you read on: with four ranks, how many tensors
# does each rank have to send *at least*, if none is to send more than the others?

# %%
guess_tensors = 1.5  # your number

# %% [markdown]
# ## Build: a ring
#
# The trick is to give everybody a share of the adding. Cut the tensor into N pieces, and let each travel around the
# ring, summed as it goes. Every rank sends one *piece* per round, to its neighbour, and all links are busy in all
# rounds.
#
# ![A ring all-reduce on four ranks, round by round: three rounds of reduce-scatter, then three of
# all-gather](../images/ring_all_reduce.svg)
#
# One sentence says it all: *begin with the piece that has the number of the rank before you; from then on, pass on what
# has just arrived.* In the first N − 1 rounds what arrives is added to your own; in the next N − 1 it replaces your
# own.


# %%
def ring(ranks):
    """The messages (round, from, to, piece) of a ring all-reduce."""
    messages, carried = [], [(rank - 1) % ranks for rank in range(ranks)]
    for number in range(2 * (ranks - 1)):
        messages += [(number, rank, (rank + 1) % ranks, carried[rank]) for rank in range(ranks)]
        carried = [carried[rank - 1] for rank in range(ranks)]
    return messages


assert len(ring(4)) == 24
play.collective(ring(4), ranks=4)

# %% [markdown]
# Follow one piece with the slider: where does piece 0 start, and where is its sum complete? After three rounds rank r
# holds the sum of piece r, and of no other: a `reduce_scatter`. The last three rounds are an `all_gather`.
#
# When the number of elements is not divisible by N, `tensor_split` makes the first pieces one element longer. With
# fewer elements than ranks some pieces are empty, and `exchange` sends nothing for them.

# %%
assert [len(piece) for piece in torch.arange(10).tensor_split(4)] == [3, 3, 2, 2]
assert [len(piece) for piece in torch.arange(3).tensor_split(4)] == [1, 1, 1, 0]

x = torch.zeros(10)
x.tensor_split(4)[1].add_(1)  # a tuple of views: this writes into x
assert x.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]

# %% [markdown]
# ### Exercise 2: reduce_scatter, the first half of the ring (15 minutes)
#
# Write one round: which piece leaves, which arrives, and what happens to it? `step` counts the rounds from 1. What
# arrives needs a place of its own before it is added; `buffer` is as long as the longest piece.
#
# Budget: each rank sends N − 1 messages of one piece each, so (N − 1)/N of the tensor, and again without a built-in
# collective; and as many rounds as a ring takes, at most twice as many, so not one rank after the other. A ring in the
# other direction, or sending each piece straight to its owner, is just as good.


# %%
def my_reduce_scatter(tensor, group=None):
    """Piece r of `tensor` (any shape and dtype, in place) on rank r becomes the sum over all
    ranks; returns it, 1-D."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = tensor.view(-1).tensor_split(ranks)
    buffer = torch.empty_like(pieces[0])
    for step in range(1, ranks):
        ### BEGIN SOLUTION
        mine = pieces[(rank - step - 1) % ranks]
        theirs = buffer[: len(mine)]
        before = pieces[(rank - step) % ranks]
        exchange(group, send=(before, rank + 1), receive=(theirs, rank - 1))
        mine += theirs
        ### END SOLUTION
    return pieces[rank]


check.reduce_scatter(my_reduce_scatter)

# %% [markdown]
# ### Exercise 3 (optional): all_gather, the second half (10 minutes)
#
# Now rank r brings piece r, and everybody wants all of them. Here too each rank passes on what has just arrived,
# beginning with its own piece; nothing is added, so a message can go straight to its place.
#
# Budget: again N − 1 messages of one piece each, whichever way they go, in as many rounds.


# %%
def my_all_gather(tensor, group=None):
    """Rank r brings piece r of `tensor` (any shape and dtype, in place); afterwards every rank
    has all of them."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = tensor.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        ### BEGIN SOLUTION
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))
        ### END SOLUTION


check.all_gather(my_all_gather)

# %% [markdown]
# And the two together are what we came for, within the two budgets added up: 2 (N − 1) messages of one piece each. If
# yours pass, every `all_reduce` below is *your own*; if you have left an exercise for later, it is the course's.


# %%
def my_all_reduce(tensor, group=None):
    """Every rank's `tensor` becomes the sum over all ranks, the same bits everywhere."""
    my_reduce_scatter(tensor, group)
    my_all_gather(tensor, group)


answer = check.all_reduce(my_all_reduce)
all_reduce = my_all_reduce if answer.ok else collectives.all_reduce
answer

# %% [markdown]
# ## Measure: bytes
#
# Here is the same table as before, with the ring in it, and then your guess.

# %%
costs(through_rank_0, everyone_to_everyone, all_reduce)

# %%
question = "With four ranks, how many tensors does each have to send?"
check.predict(question, guess_tensors, busiest(all_reduce, 4))

# %% [markdown]
# Each rank sends N − 1 pieces in each half, and a piece is 1/N of the tensor: **2 (N − 1)/N tensors**. From two ranks
# to a thousand that does not even double:

# %%
limits = {f"{n} ranks": float(cost.all_reduce_limit(1, n)) for n in (2, 4, 8, 64, 1024)}
assert limits["4 ranks"] == 1.5 and limits["1024 ranks"] < 2
draw.chart(limits, "", caption="Tensors that each rank sends in a ring all-reduce")

# %% [markdown]
# It cannot be done with fewer bytes, as long as only the ranks do the adding. Take a single element. Before anybody can
# know its sum, each of the N − 1 others must have sent something; and afterwards, N − 1 others must be told. That makes
# 2 (N − 1) messages for each element, and N ranks to share them (proved with care by Patarasuk and Yuan, 2009,
# *Bandwidth optimal all-reduce algorithms for clusters of workstations*).
#
# Did the job do what the drawing said? The recording shows who sent what to whom in which round. An arrow carries the
# number of its piece, found by where it lies in the tensor. (If what was sent is not a view of the tensor but a copy,
# nobody can say which piece it was: the arrow then carries the number of bytes.)

# %%
recording = run(outcome, all_reduce, ranks=4, record="communication").recording
if {sent[:3] for sent in draw.sends(recording)} != {sent[:3] for sent in ring(4)}:
    print("No: yours takes another route, at the same price.")
    print("What follows is about this ring, and uses the course's.")
    all_reduce = collectives.all_reduce
draw.messages(draw.sends(recording), ranks=4)

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: a ring all-reduce gives the right sum, and each rank sends 2 (N − 1)
# > whole tensors where 2 (N − 1)/N would do. A course's solution passed whole tensors around the ring: half-way
# > through, every rank held the full sum, and the remaining rounds did nothing useful. Its test cell raised a
# > `TypeError` before it reached the solution, so nobody saw that it also hung on NCCL
# > ([ARENA_3.0#407](https://github.com/callummcdougall/ARENA_3.0/pull/407), September 2026).
#
# Now for every collective of [labs/collectives.py](../labs/collectives.py), predicted to the byte by
# [labs/cost/traffic.py](../labs/cost/traffic.py), which knows the algorithm of each (ring, tree, doubling) and
# shares no code with it. The tensor has 1,001 elements, a number divisible neither by 4 nor by 3, so the ranks' shares
# differ by an element or two. (`all_reduce_doubling` comes in the next section.)


# %%
def swap(x):
    """all_to_all: rank r sends piece i of its tensor to rank i."""
    ranks = dist.get_world_size()
    arrived = torch.empty(ranks, len(x.tensor_split(ranks)[dist.get_rank()]))
    collectives.all_to_all(list(arrived), list(x.tensor_split(ranks)))


NAMES = ["broadcast", "reduce", "reduce_scatter", "all_gather", "all_reduce"]
NAMES += ["all_reduce_doubling", "all_to_all"]
OURS = {name: getattr(collectives, name) for name in NAMES}
OURS |= {"all_reduce": all_reduce, "all_to_all": swap}


def each(ways, n):
    """Every collective, one per step, on n float32 elements."""
    for collective in ways.values():
        mark("step")
        collective(torch.ones(n))


# %%
def predicted(name, n, ranks):
    """Bytes that ranks 0, 1, ... send for n float32 elements, by labs.cost."""
    return [4 * getattr(cost, name)(n, ranks, rank).elements for rank in range(ranks)]


def measured(recording, step):
    """Bytes that ranks 0, 1, ... sent in one step of a recorded job."""
    return [recording.sent(rank, step) for rank in range(recording.ranks)]


# %%
def audit(n, ranks):
    """The ledger of every collective, rank by rank."""
    recording = run(each, OURS, n, ranks=ranks, record="communication").recording
    rows = {}
    for step, name in enumerate(NAMES):
        sides = predicted(name, n, ranks), measured(recording, step)
        rows[name] = (*[" + ".join(f"{sent:,}" for sent in side) for side in sides], "")
    caption = f"bytes sent by rank 0 + rank 1 + ... of {ranks}; {n:,} elements"
    return draw.ledger(rows, caption=caption)


audit(1001, ranks=4)

# %%
audit(1001, ranks=3)

# %% [markdown]
# In a tree some ranks send much and some nothing; in a ring all send about the same. `reduce_scatter` and `all_gather`
# add up to `all_reduce`, rank by rank.
#
# ## Measure: time
#
# Bytes are not everything. A common model of a message has two numbers: **latency** α, the seconds before anything
# arrives, and **bandwidth** W, the bytes per second from then on. A message of m bytes takes α + m/W. The ring sends
# little, but in 2 (N − 1) rounds, and pays α in each.
#
# **Recursive doubling** makes the opposite trade. In round k each rank exchanges its *whole* tensor with the rank 2ᵏ
# away, and adds: after log₂ N rounds all have the whole sum. (When N is not a power of two, the ranks beyond the
# largest power of two below N first hand their tensor to another rank, and are told the result at the end. In the
# ledger for three ranks, rank 2 is one of these.) In the picture there is one piece, number 0: the whole tensor.

# %%
# ^ flips one bit: 5 ^ 1 is 4
doubling = [(k, rank, rank ^ 2**k, 0) for k in range(3) for rank in range(8)]
draw.messages(doubling, ranks=8)

# %% [markdown]
# ### Exercise 4: seconds, on paper (15 minutes)
#
# What does an all-reduce take, by this model of a message? In a round all ranks send at the same moment, so a round
# takes as long as one message; the additions take no time. Write it for the ring, and for a tree: `reduce`, then
# `broadcast`. One rank alone needs no time at all.


# %%
def ring_seconds(size, ranks, latency, bandwidth):
    """Seconds of an all-reduce around a ring, of size bytes on each rank; a piece has size /
    ranks, whole or not.

    latency: seconds per message, even an empty one; bandwidth: bytes per second that leave a
    rank, while as many arrive
    """
    ### BEGIN SOLUTION
    rounds = 2 * (ranks - 1)
    piece = size / ranks
    return rounds * (latency + piece / bandwidth)
    ### END SOLUTION


ring_answer = check.ring_seconds(ring_seconds)
ring_answer


# %%
def tree_seconds(size, ranks, latency, bandwidth):
    """The same for reduce, then broadcast, both by the tree of exercise 1: whole tensors, any
    number of ranks."""
    ### BEGIN SOLUTION
    rounds = math.ceil(math.log2(ranks))
    return 2 * rounds * (latency + size / bandwidth)
    ### END SOLUTION


tree_answer = check.tree_seconds(tree_seconds)
tree_answer

# %% [markdown]
# Here are all three algorithms, with your formulas where they are right.
#
# Fewer rounds, more bytes. Which is quicker? Both axes are logarithmic: where a line is flat, latency is all that
# counts, and where it rises, bandwidth is. The dots are at the sliders' setting, and the terms of the formulas that a
# slider moves light up. Begin with 1 MB on 8 ranks; make the tensor small, then large; then the job large.

# %%
play.all_reduce_times(
    {
        "ring": ring_seconds if ring_answer else cost.ring_seconds,
        "doubling": cost.doubling_seconds,
        "reduce, broadcast": tree_seconds if tree_answer else cost.tree_seconds,
    }
)

# %% [markdown]
# Small tensors are all latency, and the fewest rounds win; large ones are all bandwidth, and the fewest bytes win.
# Where is the border? Double the size until the ring is quicker:


# %%
def border(ranks, latency=20e-6, bandwidth=10e9):
    """The first power of two, in bytes, at which the ring is quicker than doubling."""
    size, wire = 1, (ranks, latency, bandwidth)
    while cost.ring_seconds(size, *wire) > cost.doubling_seconds(size, *wire):
        size *= 2
    return size


draw.table([{"ranks": n, "the ring wins from": draw.size(border(n))} for n in (4, 8, 64, 1024)])

# %% [markdown]
# And on your machine? This is the time of one all-reduce, of 32 bytes and of 16 MB, the median of nine. (The `barrier`
# makes all ranks start together.) Few rounds should win at 32 bytes, and few bytes at 16 MB; does your machine agree?
# Bear in mind that eight ranks share your cores, where a cluster gives each rank a device, and that memory stands in
# for the network.


# %%
def seconds(all_reduce, elements):
    """The median time of an all-reduce, s."""
    x, times = torch.ones(elements), []
    for _ in range(10):
        collectives.barrier()
        start = time.perf_counter()
        all_reduce(x)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[4]  # the first one also connects


for elements in 8, 4_000_000:
    for way in all_reduce, collectives.all_reduce_doubling:
        took = run(seconds, way, elements, ranks=8)[0]
        print(f"{4 * elements:,} bytes, {way.__name__}: {1000 * took:.2f} ms")

# %% [markdown]
# A **timeline** shows when a rank did what: on top the names of its phases; below, what was on its way (sends, `s`,
# above receives, `r`, each numbered); at the bottom what it computed and, hatched, where it waited. This is one ring
# all-reduce of 16 MB, which the slider replays; look for the six rounds, and for ranks that wait because their
# neighbour is late.


# %%
def watched():
    """One ring all-reduce of 16 MB, its halves marked."""
    x = torch.ones(4_000_000)
    all_reduce(x)  # the first one also connects
    collectives.barrier()
    mark("step")
    mark("reduce_scatter")
    collectives.reduce_scatter(x)
    mark("all_gather")
    collectives.all_gather(x)


play.replay(run(watched, ranks=4, record="communication").recording, step=0)

# %% [markdown]
# ## Native
#
# At work you call `torch.distributed`, and a **backend** does the sending: *gloo* between CPUs, *NCCL* between NVIDIA
# GPUs. PyTorch 2.13 calls the forms that take one flat tensor `all_gather_single` and `reduce_scatter_single`; in
# earlier versions they are `all_gather_into_tensor` and `reduce_scatter_tensor`. They need pieces of equal size, so
# here we take 1,000 elements on four ranks.

# %%
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_piece(x):
    """This rank's piece of x, as a tensor of its own."""
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


NATIVE = {
    "broadcast": lambda x: dist.broadcast(x, src=0),
    "reduce": lambda x: dist.reduce(x, dst=0),
    "reduce_scatter": lambda x: scatter_single(own_piece(x), x),
    "all_gather": lambda x: all_gather_single(x, own_piece(x)),
    "all_reduce": dist.all_reduce,
    "all_to_all": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
}

# %% [markdown]
# The same ledger, now summed over all ranks: PyTorch's `broadcast` is a single call, and does not say which rank sends
# what.

# %%
recorded = partial(run, ranks=4, record="communication")
ours = recorded(each, {name: OURS[name] for name in NATIVE}, 1000).recording
native = recorded(each, NATIVE, 1000).recording
rows = {}
for step, name in enumerate(NATIVE):
    sides = predicted(name, 1000, 4), measured(ours, step), measured(native, step)
    rows[name] = [sum(side) for side in sides]
draw.ledger(rows, caption="bytes sent by all of 4 ranks; 1,000 elements")

# %% [markdown]
# All exact, but look at what was counted. In ours the recording sees every message. In PyTorch's it sees only *calls*,
# and from their sizes it *books* for each call the least that it must send: these are **logical bytes**. What the
# backend really puts on the **wire** is another matter. Linux counts the bytes that each connection has delivered; we
# ask before and after.

# %%
from labs.kit.sockets import delivered


def wire(ways, n):
    """Bytes that this rank really sent for each collective; None on systems that do not
    count."""
    sent = {}
    for name, collective in ways.items():
        x = torch.ones(n)
        collective(x)  # the first one also connects
        dist.barrier()
        before = delivered()
        collective(x)
        dist.barrier()
        sent[name] = None if before is None else delivered() - before
    return sent


# %% tags=["nbval-ignore-output"]
def times_logical(ways, name, n=2**20, ranks=4):
    """All ranks' bytes on the wire, as a multiple of the logical ones."""
    sent = [rank[name] for rank in run(wire, {name: ways[name]}, n, ranks=ranks)]
    logical = sum(predicted(name, n, ranks))
    return "not counted here" if None in sent else f"{sum(sent) / logical:.2f} ×"


both = {"ours": OURS, "native (gloo)": NATIVE}
rows = []
for name in NATIVE:
    rows.append({"": name, **{side: times_logical(ways, name) for side, ways in both.items()}})
draw.table(rows)

# %% [markdown]
# There it is: gloo has no `reduce_scatter` of its own. It runs an `all_reduce`, which is twice the bytes, and throws
# the other pieces away; its `reduce` is not a plain tree either. So when a later notebook says "measured" of what a
# strategy sends, the bytes of every `dist` call are worked out from its sizes: logical bytes, which hold for any
# backend. Where the wire carries more, the notebook says so.
#
# PyTorch's collectives can also leave you time to do something else. With `async_op=True` a collective only starts; you
# get a handle, go on computing, and `wait()` when you need the result. Until then the tensor is not yours to touch.


# %%
def meanwhile():
    """When a call returned, and when its sum was there; ms."""
    x = torch.ones(4_000_000)
    dist.all_reduce(x)  # the first one also connects
    dist.barrier()
    start = time.perf_counter()
    work = dist.all_reduce(x, async_op=True)
    started = time.perf_counter()
    # Anything may be computed here, but not with x.
    work.wait()
    return [1000 * (moment - start) for moment in (started, time.perf_counter())]


started, done = run(meanwhile, ranks=4)[0]
print(f"the call came back after {started:.2f} ms, the sum was there after {done:.2f} ms")

# %% [markdown]
# In notebook 03 the gradients of the last layers travel like this while the first layers still compute theirs. Ours
# can do it, too: `collectives.all_reduce(x, async_op=True)`.
#
# **NCCL** (described here, not run) has rings and trees side by side, and chooses anew for each size, by a model like
# the one above that knows the nodes, the GPUs and their links
# ([a maintainer's words](https://github.com/NVIDIA/nccl/issues/754)). Where the network's switches can add, a rank
# sends its tensor about once and gets the sum back: less than 2 (N − 1)/N, as it is no longer only the ranks that add.

# %% [markdown]
# ## Why, and why not
#
# Back to the question. The gradient of Llama 3 8B, on links of 50 GB/s with 20 µs of latency, by the formulas:


# %%
def bill(ranks, latency=20e-6, bandwidth=50e9):
    """One all-reduce of the gradient."""
    return {
        "ranks": ranks,
        "each sends, GB": round(cost.all_reduce(gradient, ranks).elements / 1e9, 2),
        "ring, s": round(cost.ring_seconds(gradient, ranks, latency, bandwidth), 3),
        "of that, latency, s": round(cost.ring_seconds(0, ranks, latency, bandwidth), 4),
        "doubling, s": round(cost.doubling_seconds(gradient, ranks, latency, bandwidth), 3),
    }


draw.table([bill(ranks) for ranks in (2, 4, 8, 64, 1024)])

# %% [markdown]
# **Why a ring**: what a rank sends hardly depends on N, all links are busy in all rounds, and each piece is added up
# once and then copied, so all ranks end with the *same bits*. **Why not**: its latency grows with N. For a loss value,
# a norm, or a flag, take the fewest rounds. And the `all_reduce` of a large gradient takes a good part of a second in
# which nobody computes, unless it overlaps with something.
#
# The same bits on all ranks are worth a look. Copies of a model that differ in the last digit can drift apart, step by
# step.

# %%
for way in everyone_to_everyone, all_reduce:
    copies = run(outcome, way, ranks=4)
    same = all(torch.equal(copies[0], copy) for copy in copies)
    print(f"{way.__name__}: the same bits on all ranks: {'yes' if same else 'no'}")

# %% [markdown]
# Everyone added the same four numbers, but each in a different order, and floating-point sums depend on the order.
#
# ## Say it back
#
# Now from memory: what does a rank send in each of these, by rings, in multiples of the tensor?


# %%
def sent_by_rings(ranks):
    """{"reduce_scatter": …, "all_gather": …, "all_reduce": …, "all_to_all": …}, each × the
    tensor's bytes."""
    ### BEGIN SOLUTION
    pieces = (ranks - 1) / ranks
    once = ("reduce_scatter", "all_gather", "all_to_all")
    return dict.fromkeys(once, pieces) | {"all_reduce": 2 * pieces}
    ### END SOLUTION


check.sent_by_rings(sent_by_rings)

# %% [markdown]
# Answer each aloud before you unfold it.
#
# <details><summary>In a ring, why does a rank send hardly more when there are more ranks?</summary>
#
# It sends 2 (N − 1) pieces, but a piece is 1/N of the tensor: in all 2 (N − 1)/N tensors, always less than two.
# </details>
#
# <details><summary>512 ranks need the sum of one number each. Ring or doubling?</summary>
#
# Doubling: 9 rounds instead of 1,022. With so few bytes only the rounds count. (A ring would even have 511 empty
# pieces.)
# </details>
#
# <details><summary>What is wrong with <code>if loss.isnan(): dist.all_reduce(stop)</code>?</summary>
#
# A rank whose loss is not NaN does not join, and the others wait for it forever. Let every rank call it in every step,
# each with its own flag: then all know whether any of them saw a NaN.
# </details>
#
# | collective | rounds | elements that a rank sends, of n | you will meet it in |
# |---|---|---|---|
# | `broadcast` | ⌈log₂ N⌉ | n to each of its children | replicas that start equal |
# | `reduce` | ⌈log₂ N⌉ | n; the root, nothing | a metric on one rank |
# | `reduce_scatter` | N − 1 | (N − 1)/N n | gradients, sharded |
# | `all_gather` | N − 1 | (N − 1)/N n | parameters, sharded |
# | `all_reduce` | 2 (N − 1) | 2 (N − 1)/N n | gradients, replicated |
# | `all_reduce_doubling` | log₂ N | n log₂ N | small tensors |
# | `all_to_all` | N − 1 | (N − 1)/N n | experts |
#
# Predicted, ours and PyTorch's stand side by side in the ledger under *Native*.

# %% [markdown]
# ## Beat it: the quickest sum on a slow wire (30 minutes)
#
# From here it is open: no answer is the only right one, and the course's own can be beaten. Your function adds up
# tensors of 100, 2,000, 8,000 and 40,000 numbers on eight ranks, then on six. On this wire a message costs α + m/W, as
# above, and 1,000 numbers take as long as one α. A rank sends one message at a time and receives one at a time, and
# each keeps the sender busy for all of its α + m/W. The job is a real one, its messages are recorded, and what they
# cost is worked out from that. So the score is the same on any machine.
#
# **The bound.** With each message, a rank's numbers reach at most twice as many ranks: the last one has heard of them
# after ⌈log₂ N⌉ latencies, and not before. And some rank sends 2 (N − 1)/N of its tensor. No sum takes less than the
# longer of these two times, and that is 100 points. A ring everywhere scores 46.6, in the mean of the eight cases.
# The course's own answer has 63.1: that is the score to beat. Before you write anything: where does a ring lose most?
# A score is 100 × bound / time.


# %%
def quick_sum(x, latency, bandwidth):
    """x becomes the sum of all ranks' x, in place, as quickly as this wire allows.

    x: 1-D, of float64; latency: s for each message; bandwidth: bytes per s.
    Messages only: collectives.exchange, all that is built of it, or dist's isend and irecv.
    It is also called with other sizes, and in all it has two minutes.
    """
    ### BEGIN SOLUTION
    ranks, size = dist.get_world_size(), x.nbytes
    ring = cost.ring_seconds(size, ranks, latency, bandwidth)
    doubling = cost.doubling_seconds(size, ranks, latency, bandwidth)
    way = collectives.all_reduce if ring < doubling else collectives.all_reduce_doubling
    way(x)
    ### END SOLUTION


beat.slow_wire(quick_sum)

# %% [markdown]
# Each try in this notebook is kept, and `python -m labs challenges` shows your best.
#
# <details><summary>Where is there room?</summary>
#
# Between the two: halve the tensor with one partner, and only then double. And 6 is 2 × 3.
# </details>
#
# **Read on**: [labs/collectives.py](../labs/collectives.py), which you can now read in one sitting; Thakur,
# Rabenseifner and Gropp, 2005, *Optimization of Collective Communication Operations in MPICH*.
#
# **Next.** Ranks can now add up a tensor, and as long as only ranks add, no other way sends less. If copies of a model
# average their gradients like this, is it still the same training, and can the time that it takes be hidden? That is
# [03 DDP](03_ddp.ipynb).
#
# A clean copy of this notebook: `git restore notebooks/02_collectives.ipynb`, then *File > Reload Notebook from Disk*.
