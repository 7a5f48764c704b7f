# %% [markdown]
# # Collectives
#
# *Each of four ranks holds a tensor. How can every rank get the sum of the four tensors, and how many bytes must each
# rank send at least?*
#
# You need: [Start here](00_start_here.ipynb), where a job on several ranks is a function call.
# **Minutes**, by estimate: 40 without exercises, 85 with them, 10 more for optional parts, 35 more for the challenge.
# Running all cells takes about a minute and 1 GB of memory.
#
# First, answer three questions on earlier notebooks; each run of the cell asks different ones. Say the answer aloud
# before you unfold it.

# %%
from labs.kit import recall

recall.ask("02")

# %% [markdown]
# ## Question
#
# In the next notebook four ranks train copies of one model, each rank on its own quarter of the batch. Each rank
# computes the gradient of its quarter, and before the optimizer steps, every rank needs the mean of the four gradients.
# But a **rank** is a process with its own memory, and cannot read the memory of another rank. It can only *send* a
# tensor to another rank, or *receive* one.
#
# Is it expensive to send a gradient? The next cell computes the size of the gradient for one of today's smaller models,
# at two bytes per number.

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
# A **collective** is an operation in which all ranks of a group take part. This course needs seven: the six in the
# picture, and a `barrier`, which sends no data and which no rank leaves before every rank has entered it. In the
# picture, a row is a rank, and a tensor is cut into as many **pieces** as there are ranks. To **reduce** tensors is to
# combine them, here by adding.
#
# ![Six collectives on four ranks, before and after: broadcast, reduce, all_reduce, all_gather, reduce_scatter and
# all_to_all](../images/collectives.svg)
#
# The question asks for an `all_reduce`. Two of the other collectives together do the same: `reduce_scatter` leaves one
# piece of the sum on each rank, and `all_gather` gives every rank all pieces. So a `reduce_scatter` followed by an
# `all_gather` is an `all_reduce`. The fastest algorithm below is built from this fact.

# %% [markdown]
# ## Predict
#
# Each rank r contributes the tensor `[10r, 10r + 1, 10r + 2, 10r + 3]`, so each piece is one number. After a
# `reduce_scatter`, which number does rank 2 hold? Type your guess, then run the two cells.

# %%
guess_number = 68  # your number


def glance():
    """Return the numbers that this rank holds after each collective."""
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
# Compare the table with the picture. After `reduce` only rank 0 has the sum; the other ranks hold partial sums, which
# are left over from the algorithm and not meant to be used. The table shows the results of the collectives. Now we
# build them from send and receive alone.

# %% [markdown]
# ## Build: send and receive
#
# `send` and `recv` come in pairs: the sender names the destination, and the receiver names the source. The receiver
# provides a tensor of the right size and dtype, and the message overwrites it. Every rank runs the *same* function;
# inside the function, the rank's number decides whether it sends or receives.


# %%
def hand_over():
    """Send three numbers from rank 0 to rank 1."""
    if dist.get_rank() == 0:
        dist.send(torch.tensor([1.0, 2.0, 3.0]), dst=1)
    else:
        x = torch.empty(3)
        dist.recv(x, src=0)
        return x.tolist()


assert run(hand_over, ranks=2) == [None, [1.0, 2.0, 3.0]]

# %% [markdown]
# Now let all four ranks send at once, around a ring: each rank sends to the next rank, and receives from the previous
# rank. Before you run the cell, think: which rank can finish its `send` first? This cell is *meant* to fail.


# %% tags=["raises-exception"]
def ring_of_sends():
    """Send a tensor to the next rank, on all ranks at once; this hangs."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, theirs = torch.ones(4), torch.empty(4)
    dist.send(mine, dst=(rank + 1) % ranks)
    dist.recv(theirs, src=(rank - 1) % ranks)


run(ring_of_sends, ranks=4)

# %% [markdown]
# `send` **blocks**: it does not return before the receiver has begun to receive. All four ranks wait in their `send`,
# and no rank ever reaches `recv`. This is a **deadlock**. Some libraries buffer small messages; with them such a
# program works until the tensor grows. On a cluster the job would print nothing until a timeout, many minutes later.
# Here the launcher records what every rank waits for, notices that the ranks wait in a circle, and tells you the line
# at which each rank waits.
#
# Another common mistake is a rank that never calls the collective. This cell is meant to fail, too.


# %% tags=["raises-exception"]
def absent():
    """Call all_reduce on every rank but rank 3; this hangs."""
    x = torch.ones(4)
    if dist.get_rank() != 3:
        dist.all_reduce(x)


run(absent, ranks=4)

# %% [markdown]
# Many jobs hang because a collective is called inside an `if` that tests the rank. The rule is: *every rank of a group
# calls the same collectives in the same order.*
#
# How can ranks send around a ring without a deadlock? `isend` and `irecv`, where i stands for *immediate*, only
# **post** a message: they return at once with a handle to wait on. So every rank posts both of its messages, and then
# waits for both. The function `exchange` from [labs/collectives.py](../labs/collectives.py) does this; it takes the
# numbers of peers modulo N, the number of ranks.


# %%
def ring_of_exchanges():
    """Send a number to the next rank, on all ranks at once."""
    rank = dist.get_rank()
    mine, theirs = torch.tensor([rank]), torch.tensor([-1])
    exchange(None, send=(mine, rank + 1), receive=(theirs, rank - 1))
    return theirs.item()


assert run(ring_of_exchanges, ranks=4) == [3, 0, 1, 2]

# %% [markdown]
# One such exchange by all ranks is a **round**. From here on, you can build every collective from `exchange`. Its first
# argument is the *group* of ranks that take part; `None` means all ranks.
#
# ## Build: broadcast, a tree
#
# Rank 0 has a tensor, and eight ranks need it. If rank 0 sent it to the others one after another, that would take seven
# rounds, with six ranks idle in each round. A tree is faster: *in each round, every rank that has the tensor sends it
# to one more rank.* So the number of ranks that have the tensor doubles in each round. The next cell describes a
# collective as a list of messages (round, from, to, piece). Drag the slider, or press play.

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
# Write what one rank does in one round. `me` is this rank's distance from the root, so `me` is 0 on the root. Before
# the round, the ranks with `me < distance` have the tensor. In the round, some ranks send it, some ranks receive it,
# and some do nothing. When N is not a power of two, some ranks have the tensor and no rank is left to send it to. Peers
# are `rank ± distance`. The lines before the loop deal with groups and roots: leave them as they are, and pass `group`
# to `exchange`.
#
# Budget: all ranks together send N − 1 messages, in ⌈log₂ N⌉ rounds. Use `exchange` or your own sends and receives, but
# no built-in collective. As in all exercises of this notebook, you may allocate memory for one copy of the tensor. Any
# tree within this budget is right.


# %%
def my_broadcast(tensor, src=0, group=None):
    """Copy the `tensor` of global rank `src` into the `tensor` of every rank, in place. It has
    any shape and dtype."""
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
# The check runs your function in real jobs, with sizes, groups and dtypes that you may not have thought of, and counts
# the bytes that you send. `reduce` uses the same tree backwards: the leaves begin, and each rank adds the tensors that
# it receives to its own before it sends the sum on.
#
# ## Build: the sum, the obvious way
#
# Two ways to do an `all_reduce` come to mind. In the first, all ranks send their tensors to rank 0, which adds them up
# and sends the sum to all ranks. In the second, every rank sends its tensor to every other rank, and each rank adds up
# all tensors itself.


# %%
def through_rank_0(x):
    """Add up all tensors on rank 0, which sends the sum to all ranks."""
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
    """Send every tensor to every rank, and add them up on every rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, theirs = x.clone(), torch.empty_like(x)
    for step in range(1, ranks):
        exchange(None, send=(mine, rank + step), receive=(theirs, rank - step))
        x += theirs


def outcome(all_reduce):
    """Return a rank's tensor after an all-reduce. The ranks' numbers have a fraction that
    floats must round."""
    x = dist.get_rank() + torch.arange(8000) / 7
    all_reduce(x)
    return x


for way in through_rank_0, everyone_to_everyone:
    assert torch.allclose(run(outcome, way, ranks=4)[0], 6 + 4 * torch.arange(8000) / 7)

# %% [markdown]
# Both ways give the right sum. How many bytes do they send? `record="communication"` watches a job from outside and
# counts every message; the tensor here has 8,000 elements of 4 bytes. The table shows how much the busiest rank sends,
# as a multiple of the size of this tensor.


# %%
def busiest(all_reduce, ranks):
    """Return how much the busiest rank sends, in multiples of the tensor."""
    recording = run(outcome, all_reduce, ranks=ranks, record="communication").recording
    return max(recording.sent(rank) for rank in range(ranks)) / 32_000


def costs(*ways):
    """Draw how much the busiest rank sends, by algorithm and number of ranks."""
    shares = {way.__name__: {f"{n} ranks": busiest(way, n) for n in (2, 4, 8)} for way in ways}
    return draw.table([{"": name, **each} for name, each in shares.items()])


costs(through_rank_0, everyone_to_everyone)

# %% [markdown]
# Either way, the busiest rank sends N − 1 tensors: seven times as many on eight ranks as on two. When all tensors pass
# through rank 0, one link is busy and all the other links are idle. When every rank sends to every rank, all links
# carry the same numbers again and again. Is there an algorithm whose cost does not grow with N? Guess before you read
# on: with four ranks, how many tensors does each rank have to send *at least*, if no rank may send more than the
# others?

# %%
guess_tensors = 1.5  # your number

# %% [markdown]
# ## Build: a ring
#
# The trick is to share the additions among all ranks. Cut the tensor into N pieces. Each piece travels around the ring,
# and each rank that it reaches adds its own numbers to the piece. Every rank sends one *piece* per round, to the next
# rank, and all links are busy in all rounds.
#
# ![A ring all-reduce on four ranks, round by round: three rounds of reduce-scatter, then three of
# all-gather](../images/ring_all_reduce.svg)
#
# Every rank follows one rule: *in the first round, send the piece that has the number of the previous rank; in every
# later round, send the piece that has just arrived.* In the first N − 1 rounds a rank adds the arriving piece to its
# own. In the next N − 1 rounds the arriving piece replaces its own.


# %%
def ring(ranks):
    """Return the messages (round, from, to, piece) of a ring all-reduce."""
    messages, carried = [], [(rank - 1) % ranks for rank in range(ranks)]
    for number in range(2 * (ranks - 1)):
        messages += [(number, rank, (rank + 1) % ranks, carried[rank]) for rank in range(ranks)]
        carried = [carried[rank - 1] for rank in range(ranks)]
    return messages


assert len(ring(4)) == 24
play.collective(ring(4), ranks=4)

# %% [markdown]
# Follow one piece with the slider: where does piece 0 start, and where is its sum complete? After three rounds, each
# rank r holds the complete sum of piece r and of no other piece: the first three rounds are a `reduce_scatter`. The
# last three rounds are an `all_gather`.
#
# When the number of elements is not divisible by N, `tensor_split` makes the first pieces one element longer. When
# there are fewer elements than ranks, some pieces are empty, and `exchange` sends no message for an empty piece.

# %%
assert [len(piece) for piece in torch.arange(10).tensor_split(4)] == [3, 3, 2, 2]
assert [len(piece) for piece in torch.arange(3).tensor_split(4)] == [1, 1, 1, 0]

x = torch.zeros(10)
x.tensor_split(4)[1].add_(1)  # a tuple of views: this writes into x
assert x.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]

# %% [markdown]
# ### Exercise 2: reduce_scatter, the first half of the ring (15 minutes)
#
# Write one round: which piece does the rank send, which piece does it receive, and what does it do with the received
# piece? `step` counts the rounds from 1. The received piece needs memory of its own before it is added: `buffer` is as
# long as the longest piece.
#
# Budget: each rank sends N − 1 messages of one piece each, which is (N − 1)/N of the tensor, and calls no built-in
# collective. The number of rounds is at most twice that of a ring, so the ranks may not take turns. A ring in the other
# direction is just as good, and so is sending each piece directly to its owner.


# %%
def my_reduce_scatter(tensor, group=None):
    """Sum piece r of `tensor` over all ranks, in place on rank r, and return this piece, 1-D.
    `tensor` has any shape and dtype."""
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
# Now each rank r contributes piece r, and every rank needs all pieces. Each rank begins with its own piece, and then
# always sends on the piece that has just arrived. Nothing is added, so a rank can receive a piece directly into its
# place in the tensor.
#
# Budget: each rank again sends N − 1 messages of one piece each, along any route, in at most as many rounds as in
# exercise 2.


# %%
def my_all_gather(tensor, group=None):
    """Copy piece r of rank r's `tensor` to all ranks, in place, for every rank r. `tensor` has
    any shape and dtype."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    pieces = tensor.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        ### BEGIN SOLUTION
        send, receive = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        exchange(group, send=(send, rank + 1), receive=(receive, rank - 1))
        ### END SOLUTION


check.all_gather(my_all_gather)

# %% [markdown]
# The two functions together make the `all_reduce` that we wanted, within the sum of their budgets: each rank sends 2 (N
# − 1) messages of one piece each. If both of your functions pass, every `all_reduce` below is *your own*. If you have
# left one for later, the cells below use the course's.


# %%
def my_all_reduce(tensor, group=None):
    """Sum `tensor` over all ranks, in place; all ranks get the same bits."""
    my_reduce_scatter(tensor, group)
    my_all_gather(tensor, group)


answer = check.all_reduce(my_all_reduce)
all_reduce = my_all_reduce if answer.ok else collectives.all_reduce
answer

# %% [markdown]
# ## Measure: bytes
#
# The next cell prints the same table as before, with the ring added, and the cell after it compares your guess.

# %%
costs(through_rank_0, everyone_to_everyone, all_reduce)

# %%
question = "With four ranks, how many tensors does each have to send?"
check.predict(question, guess_tensors, busiest(all_reduce, 4))

# %% [markdown]
# Each rank sends N − 1 pieces in each half of the ring all-reduce, and a piece is 1/N of the tensor. So each rank sends
# **2 (N − 1)/N tensors**. From two ranks to a thousand this does not even double:

# %%
limits = {f"{n} ranks": float(cost.all_reduce_limit(1, n)) for n in (2, 4, 8, 64, 1024)}
assert limits["4 ranks"] == 1.5 and limits["1024 ranks"] < 2
draw.chart(limits, "", caption="Tensors that each rank sends in a ring all-reduce")

# %% [markdown]
# No algorithm can send fewer bytes, as long as only the ranks add. Take a single element. Before some rank can know the
# sum of this element, each of the N − 1 other ranks must have sent its number or a partial sum. Then the sum must be
# sent to each of the N − 1 other ranks. So every element must be sent at least 2 (N − 1) times, and N ranks share this
# work. Patarasuk and Yuan prove it carefully (2009, *Bandwidth optimal all-reduce algorithms for clusters of
# workstations*).
#
# Did the job send the messages that the drawing shows? The recording shows the sender, the receiver and the piece of
# every message, round by round. Each arrow is labelled with the number of its piece, which the recording finds from the
# piece's place in the tensor. If the rank sent a copy instead of a view of the tensor, the piece cannot be found, and
# the arrow is labelled with the number of bytes.

# %%
recording = run(outcome, all_reduce, ranks=4, record="communication").recording
if {sent[:3] for sent in draw.sends(recording)} != {sent[:3] for sent in ring(4)}:
    print("No: yours takes another route, at the same price.")
    print("What follows is about this ring, and uses the course's.")
    all_reduce = collectives.all_reduce
draw.messages(draw.sends(recording), ranks=4)

# %% [markdown]
# > **What went wrong in the wild.** *Symptom*: a ring all-reduce gives the right sum, and each rank sends 2 (N − 1)
# > whole tensors, although 2 (N − 1)/N tensors are enough. A course's solution passed whole tensors around the ring:
# > half-way through, every rank held the full sum, and the remaining rounds did nothing useful. Its test cell raised a
# > `TypeError` before it reached the solution, so nobody saw that it also hung on NCCL
# > ([ARENA_3.0#407](https://github.com/callummcdougall/ARENA_3.0/pull/407), September 2026).
#
# The next cells compare prediction and measurement for every collective of
# [labs/collectives.py](../labs/collectives.py). The predictions come from
# [labs/cost/traffic.py](../labs/cost/traffic.py), which knows the algorithm of each collective and shares no code with
# them. The tensor has 1,001 elements, a number that neither 4 nor 3 divides, so the ranks' shares differ by an element
# or two. The next section explains `all_reduce_doubling`.


# %%
def swap(x):
    """Call all_to_all: each rank sends piece i of its tensor to rank i."""
    ranks = dist.get_world_size()
    arrived = torch.empty(ranks, len(x.tensor_split(ranks)[dist.get_rank()]))
    collectives.all_to_all(list(arrived), list(x.tensor_split(ranks)))


NAMES = ["broadcast", "reduce", "reduce_scatter", "all_gather", "all_reduce"]
NAMES += ["all_reduce_doubling", "all_to_all"]
OURS = {name: getattr(collectives, name) for name in NAMES}
OURS |= {"all_reduce": all_reduce, "all_to_all": swap}


def each(ways, n):
    """Call every collective, one per step, on n float32 elements."""
    for collective in ways.values():
        mark("step")
        collective(torch.ones(n))


# %%
def predicted(name, n, ranks):
    """Return the bytes that labs.cost predicts for ranks 0, 1, ..., for n float32 elements."""
    return [4 * getattr(cost, name)(n, ranks, rank).elements for rank in range(ranks)]


def measured(recording, step):
    """Return the bytes that ranks 0, 1, ... sent in one step of a recorded job."""
    return [recording.sent(rank, step) for rank in range(recording.ranks)]


# %%
def audit(n, ranks):
    """Draw the ledger of every collective, rank by rank."""
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
# In a tree some ranks send much and some ranks send nothing; in a ring all ranks send about the same. On every rank,
# the bytes of `reduce_scatter` and `all_gather` add up to those of `all_reduce`.
#
# ## Measure: time
#
# Bytes are not everything. A common model of a message has two numbers: the **latency** α, which is the seconds until
# the first byte arrives, and the **bandwidth** W, which is the bytes per second from then on. A message of m bytes
# takes α + m/W. The ring sends few bytes, but it takes 2 (N − 1) rounds, and each round costs α.
#
# **Recursive doubling** makes the opposite trade: few rounds and many bytes. In round k each rank exchanges its *whole*
# tensor with the rank that is 2ᵏ away, and adds the tensor that it receives. After log₂ N rounds all ranks have the
# whole sum. When N is not a power of two, let P be the largest power of two below N. The ranks from P on first send
# their tensors to other ranks, and receive the result at the end. In the ledger for three ranks, rank 2 does this. The
# picture has only one piece, number 0, which is the whole tensor.

# %%
# ^ flips one bit: 5 ^ 1 is 4
doubling = [(k, rank, rank ^ 2**k, 0) for k in range(3) for rank in range(8)]
draw.messages(doubling, ranks=8)

# %% [markdown]
# ### Exercise 4: seconds, on paper (15 minutes)
#
# How long does an all-reduce take, by this model of a message? In a round all ranks send at the same moment, so a round
# takes as long as one message. The additions take no time. Write the time as a function for the ring, and for a tree,
# which does a `reduce` and then a `broadcast`. On a single rank the all-reduce takes no time.


# %%
def ring_seconds(size, ranks, latency, bandwidth):
    """Return the seconds of a ring all-reduce of a tensor of `size` bytes. A piece has size /
    ranks bytes, whole or not.

    latency: seconds per message, even an empty one
    bandwidth: bytes per second that a rank can send, while it receives as many
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
    """Return the seconds of a reduce and then a broadcast, both by the tree of exercise 1, with
    whole tensors, on any number of ranks."""
    ### BEGIN SOLUTION
    rounds = math.ceil(math.log2(ranks))
    return 2 * rounds * (latency + size / bandwidth)
    ### END SOLUTION


tree_answer = check.tree_seconds(tree_seconds)
tree_answer

# %% [markdown]
# The chart shows all three algorithms, and uses your formulas where they are right.
#
# Is an algorithm with fewer rounds and more bytes faster, or one with more rounds and fewer bytes? Both axes are
# logarithmic. Where a line is flat, latency dominates; where it rises, bandwidth dominates. The dots mark the sliders'
# setting, and a slider lights up the terms of the formulas that depend on it. Begin with 1 MB on 8 ranks. Make the
# tensor small, then large, and then raise the number of ranks.

# %%
play.all_reduce_times(
    {
        "ring": ring_seconds if ring_answer else cost.ring_seconds,
        "doubling": cost.doubling_seconds,
        "reduce, broadcast": tree_seconds if tree_answer else cost.tree_seconds,
    }
)

# %% [markdown]
# For small tensors latency dominates, and the algorithm with the fewest rounds is fastest. For large tensors bandwidth
# dominates, and the algorithm with the fewest bytes is fastest. At which size is the border? The next cell doubles the
# size until the ring is faster:


# %%
def border(ranks, latency=20e-6, bandwidth=10e9):
    """Return the first power of two, in bytes, at which the ring is faster than doubling."""
    size, wire = 1, (ranks, latency, bandwidth)
    while cost.ring_seconds(size, *wire) > cost.doubling_seconds(size, *wire):
        size *= 2
    return size


draw.table([{"ranks": n, "the ring wins from": draw.size(border(n))} for n in (4, 8, 64, 1024)])

# %% [markdown]
# Does your machine agree with the model? The next cell measures the time of one all-reduce of 32 bytes and of one of 16
# MB, as the median of five runs. The `barrier` makes all ranks start together. At 32 bytes the algorithm with few
# rounds should be faster, and at 16 MB the one with few bytes. Keep in mind that eight ranks share your cores, whereas
# a cluster gives each rank a device, and that your machine's memory takes the place of a network.


# %%
def seconds(all_reduce, elements):
    """Return the median time of an all-reduce, in seconds."""
    x, times = torch.ones(elements), []
    for _ in range(6):
        collectives.barrier()
        start = time.perf_counter()
        all_reduce(x)
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[2]  # the first one also connects


for elements in 8, 4_000_000:
    for way in all_reduce, collectives.all_reduce_doubling:
        took = run(seconds, way, elements, ranks=8)[0]
        print(f"{4 * elements:,} bytes, {way.__name__}: {1000 * took:.2f} ms")

# %% [markdown]
# A **timeline** shows what a rank did at each moment. The top row of a rank names its phases. Below it are the messages
# in flight: numbered sends, marked `s`, above numbered receives, marked `r`. The bottom row shows when the rank
# computed and, hatched, when it waited. The slider replays one ring all-reduce of 16 MB. Look for the six rounds, and
# for ranks that wait because their neighbour is late.


# %%
def watched():
    """Run one ring all-reduce of 16 MB, with its halves marked."""
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
# In real programs you call `torch.distributed`, and a **backend** sends the messages: *gloo* between CPUs, *NCCL*
# between NVIDIA GPUs. Two of PyTorch's collectives take one flat tensor. PyTorch 2.13 calls them `all_gather_single`
# and `reduce_scatter_single`; in earlier versions they are `all_gather_into_tensor` and `reduce_scatter_tensor`. They
# need pieces of equal size, so this section uses 1,000 elements on four ranks.

# %%
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def own_piece(x):
    """Return a copy of this rank's piece of x."""
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
# The next cell prints the same ledger, now summed over all ranks, because PyTorch's `broadcast` is a single call and
# does not reveal which rank sends how much.

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
# All rows agree exactly, but the two columns were counted in different ways. In our collectives the recording sees
# every message. In PyTorch's collectives it sees only *calls*, and computes from the size of each call the fewest bytes
# that the call must send. These bytes are **logical bytes**. The backend may really send other numbers of bytes over
# the network, the **wire**. Linux counts the bytes that each connection has delivered, and the next cells read this
# counter before and after each collective.

# %%
from labs.kit.sockets import delivered


def wire(ways, n):
    """Return the bytes that this rank really sent for each collective, or None on systems that
    do not count them."""
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
    """Return all ranks' bytes on the wire, as a multiple of the logical bytes."""
    sent = [rank[name] for rank in run(wire, {name: ways[name]}, n, ranks=ranks)]
    logical = sum(predicted(name, n, ranks))
    return "not counted here" if None in sent else f"{sum(sent) / logical:.2f} ×"


both = {"ours": OURS, "native (gloo)": NATIVE}
rows = []
for name in NATIVE:
    rows.append({"": name, **{side: times_logical(ways, name) for side, ways in both.items()}})
draw.table(rows)

# %% [markdown]
# The table shows that gloo has no `reduce_scatter` of its own. Gloo runs an `all_reduce` instead, which sends twice the
# bytes, and throws the other pieces away. Its `reduce` is not a plain tree either. So when a later notebook says that
# bytes sent were "measured", it means logical bytes, computed from the sizes of every `dist` call; they hold for any
# backend. Where more bytes travel on the wire, the notebook says so.
#
# PyTorch's collectives can also run while your program computes. With `async_op=True` the call starts the collective
# and returns a handle. You go on computing, and call `wait()` on the handle when you need the result. Until then you
# may neither read nor change the tensor.


# %%
def meanwhile():
    """Return when the call returned and when the sum was ready, in ms."""
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
# In notebook 03 the gradients of the last layers are reduced in this way while the gradients of the first layers are
# still being computed. The course's own collective has the same argument: `collectives.all_reduce(x, async_op=True)`.
#
# **NCCL**, which this notebook does not run, has both rings and trees, and chooses one for each size. It uses a model
# like the one above that knows the nodes, the GPUs and their links ([a maintainer explains
# it](https://github.com/NVIDIA/nccl/issues/754)). If the network's switches can add, each rank sends its tensor about
# once and receives the sum. That is fewer than 2 (N − 1)/N tensors, which is possible because it is no longer only the
# ranks that add.

# %% [markdown]
# ## Why, and why not
#
# Back to the question. The formulas predict how long an all-reduce of the gradient of Llama 3 8B takes, on links of 50
# GB/s with 20 µs of latency:


# %%
def bill(ranks, latency=20e-6, bandwidth=50e9):
    """Predict one all-reduce of the gradient."""
    return {
        "ranks": ranks,
        "each sends, GB": round(cost.all_reduce(gradient, ranks).elements / 1e9, 2),
        "ring, s": round(cost.ring_seconds(gradient, ranks, latency, bandwidth), 3),
        "of that, latency, s": round(cost.ring_seconds(0, ranks, latency, bandwidth), 4),
        "doubling, s": round(cost.doubling_seconds(gradient, ranks, latency, bandwidth), 3),
    }


draw.table([bill(ranks) for ranks in (2, 4, 8, 64, 1024)])

# %% [markdown]
# **Why a ring**: the bytes that a rank sends hardly depend on N, and all links are busy in all rounds. Each piece is
# added up once and then copied, so all ranks end with the *same bits*. **Why not a ring**: its latency grows with N.
# For a loss value, a norm or a flag, use the algorithm with the fewest rounds. The `all_reduce` of a large gradient
# takes a good part of a second, and no rank computes in that time unless the all-reduce overlaps with computation.
#
# It matters that all ranks get the same bits. Copies of a model that differ in the last digit can drift apart, step by
# step. The next cell tests whether two algorithms give the same bits on all ranks.

# %%
for way in everyone_to_everyone, all_reduce:
    copies = run(outcome, way, ranks=4)
    same = all(torch.equal(copies[0], copy) for copy in copies)
    print(f"{way.__name__}: the same bits on all ranks: {'yes' if same else 'no'}")

# %% [markdown]
# In `everyone_to_everyone` all ranks added the same four numbers, but each rank added them in a different order, and a
# floating-point sum depends on the order.
#
# ## Say it back
#
# Now answer from memory: how much does a rank send in each of these collectives if they are built with rings, as a
# multiple of the size of the tensor?


# %%
def sent_by_rings(ranks):
    """Return {"reduce_scatter": …, "all_gather": …, "all_reduce": …, "all_to_all": …}, each as
    a multiple of the size of the tensor."""
    ### BEGIN SOLUTION
    pieces = (ranks - 1) / ranks
    once = ("reduce_scatter", "all_gather", "all_to_all")
    return dict.fromkeys(once, pieces) | {"all_reduce": 2 * pieces}
    ### END SOLUTION


check.sent_by_rings(sent_by_rings)

# %% [markdown]
# Answer each question aloud before you unfold its answer.
#
# <details><summary>In a ring all-reduce, why does a rank send hardly more bytes when there are more ranks?</summary>
#
# A rank sends 2 (N − 1) pieces, but each piece is only 1/N of the tensor. In all it sends 2 (N − 1)/N tensors, which is
# always less than two.
# </details>
#
# <details><summary>512 ranks need the sum of one number per rank. Which is faster, a ring or recursive
# doubling?</summary>
#
# Recursive doubling is faster: it takes 9 rounds, and a ring takes 1,022. With so few bytes only the number of rounds
# matters. In a ring, 511 of the 512 pieces would even be empty.
# </details>
#
# <details><summary>What is wrong with <code>if loss.isnan(): dist.all_reduce(stop)</code>?</summary>
#
# A rank whose loss is not NaN does not call the `all_reduce`, and the other ranks wait for it for ever. Let every rank
# call the `all_reduce` in every step, each rank with its own flag. Then all ranks know whether any of them has seen a
# NaN.
# </details>
#
# | collective | rounds | elements that a rank sends, for a tensor of n elements | used later for |
# |---|---|---|---|
# | `broadcast` | ⌈log₂ N⌉ | n to each of its children | replicas that start equal |
# | `reduce` | ⌈log₂ N⌉ | n; the root sends nothing | a metric on one rank |
# | `reduce_scatter` | N − 1 | (N − 1)/N n | gradients, sharded |
# | `all_gather` | N − 1 | (N − 1)/N n | parameters, sharded |
# | `all_reduce` | 2 (N − 1) | 2 (N − 1)/N n | gradients, replicated |
# | `all_reduce_doubling` | log₂ N | n log₂ N | small tensors |
# | `all_to_all` | N − 1 | (N − 1)/N n | experts |
#
# The ledger in the section *Native* shows predicted bytes, our bytes and PyTorch's bytes side by side.

# %% [markdown]
# ## Beat it: the quickest sum on a slow wire (30 minutes)
#
# This challenge is open: there is no single right answer, and the course's own answer can be beaten. Your function adds
# up tensors of 100, 2,000, 8,000 and 40,000 numbers on eight ranks, then on six. On this wire a message of m bytes
# takes α + m/W seconds, as above, and sending 1,000 numbers takes as long as one α. A rank sends one message at a time
# and receives one at a time, and each message keeps its sender busy for all of its α + m/W. The check runs a real job,
# records its messages, and computes the time from them. So the score is the same on any machine.
#
# **The bound.** Let N be the number of ranks, M the bytes of a tensor, α the latency and W the bandwidth.
#
# time ≥ max(⌈log₂ N⌉ · α, 2 (N − 1)/N · M/W)
#
# No algorithm can beat the first term: within one α, the number of ranks that know about one rank's numbers at most
# doubles. And none can beat the second: as shown above, some rank sends at least 2 (N − 1)/N tensors.
#
# The score of a case is 100 × bound / time, and your score is the mean over the eight cases. A ring in all cases scores
# 46.6. The course's own answer scores 63.1: that is the score to beat. Before you write code, think: in which cases
# does a ring lose most? `wire_seconds(fn, numbers, ranks)` returns the seconds of one case. Add your own tries:


# %%
def ring(x, latency, bandwidth):
    collectives.all_reduce(x)


def doubling(x, latency, bandwidth):
    collectives.all_reduce_doubling(x)


wire_seconds, of_case = beat.slow_wire.measured, (2000, 8)
bars = {fn.__name__: wire_seconds(fn, *of_case) for fn in (ring, doubling)}
bars = {"the bound": beat.slow_wire.bound(8 * of_case[0], of_case[1])} | bars
draw.chart(bars, "s", caption="2,000 numbers on 8 ranks: time on the slow wire")


# %%
def quick_sum(x, latency, bandwidth):
    """Sum x over all ranks, in place, as fast as this wire allows.

    x: 1-D, float64
    latency: seconds per message
    bandwidth: bytes per second

    Send messages only: use collectives.exchange, functions built from it, or dist's isend and
    irecv. The check also calls this function with other sizes, and gives it two minutes in all.
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
# The notebook saves the score of each try, and `python -m labs challenges` shows your best one.
#
# <details><summary>Where can the course's answer be beaten?</summary>
#
# Use an algorithm between ring and recursive doubling: first exchange halves of the tensor with one partner, and then
# use recursive doubling on the half. And for six ranks, use that 6 = 2 × 3.
# </details>
#
# **Read on**: [labs/collectives.py](../labs/collectives.py) holds all collectives of this notebook, and you can now
# read it in one sitting. Thakur, Rabenseifner and Gropp, 2005, *Optimization of Collective Communication Operations in
# MPICH*, compare the algorithms.
#
# **Next.** Ranks can now add up a tensor, and as long as only ranks add, no algorithm sends fewer bytes. If copies of a
# model average their gradients with an all-reduce, is it still the same training, and can the time of the all-reduce be
# hidden? [03 DDP](03_ddp.ipynb) answers both questions.
#
# To get a clean copy of this notebook, run `git restore notebooks/02_collectives.ipynb`, and then choose *File > Reload
# Notebook from Disk*.
