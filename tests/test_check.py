"""The checks against answers that are known to be right, and against wrong ones that are known by name.

Right: the course's own functions, and a second answer that goes another way about it (pairwise exchange instead of a
ring, blocking calls, PyTorch's own DDP).  Wrong: tests/wrong_answers, which prints the share of them that is caught.
What a check measures is itself held to torch and to the wire in the tests of labs.kit.record.
"""

import contextlib
import re
import sys
import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labs import agree, collectives, ddp, native
from labs.collectives import exchange, group_rank, place, powers_of_two
from labs.kit import check
from labs.kit.checks.gradients.mistakes import Gradient
from labs.kit.checks.job import failed
from labs.kit.checks.play import Done, Seen, World
from labs.kit.launch import RankError
from tests.answers.together import together
from tests.wrong_answers import collectives as wrong_collectives
from tests.wrong_answers.answers import ANSWERS, let_past
from tests.wrong_answers.gradients import InBuckets, Wrapper, accumulate, average_in_one_vector

CHECKS = [
    "broadcast",
    "reduce_scatter",
    "all_gather",
    "all_reduce",
    "average_gradients",
    "accumulation",
    "data_parallel",
    "buckets",
    "overlap",
]


# ---- right answers ---------------------------------------------------------------------------------------


def broadcast_from_far(x, root=0, group=None):
    """The tree with the longest edges first; blocking."""
    rank, ranks = place(group)
    me = (rank - group_rank(root, group)) % ranks
    for distance in reversed(powers_of_two(below=ranks)):
        if me % (2 * distance) == 0 and me + distance < ranks:
            dist.send(x, group=group, group_dst=(rank + distance) % ranks)
        elif me % (2 * distance) == distance:
            dist.recv(x, group=group, group_src=(rank - distance) % ranks)


def reduce_scatter_by_pairs(x, group=None):
    """Everybody to everybody: each piece goes straight to where it belongs."""
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(1, ranks):
        received = torch.empty_like(pieces[rank])
        to = (rank + step) % ranks
        exchange(group, send=(pieces[to], to), receive=(received, rank - step))
        pieces[rank].add_(received)
    return pieces[rank].clone()


def all_gather_in_turns(x, group=None):
    """A ring of blocking calls: even ranks send first, odd ranks receive first."""
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(ranks - 1):
        mine, theirs = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        if rank % 2 == 0:
            dist.send(mine, group=group, group_dst=(rank + 1) % ranks)
        dist.recv(theirs, group=group, group_src=(rank - 1) % ranks)
        if rank % 2:
            dist.send(mine, group=group, group_dst=(rank + 1) % ranks)


def reduce_scatter_the_other_way_round(x, group=None):
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(1, ranks):
        mine = pieces[(rank + step + 1) % ranks]
        received = torch.empty_like(mine)
        exchange(group, send=(pieces[(rank + step) % ranks], rank - 1), receive=(received, rank + 1))
        mine += received
    return pieces[rank]


def all_gather_by_pairs(x, group=None):
    """Everybody's own piece straight to everybody."""
    rank, ranks = place(group)
    pieces = x.view(-1).tensor_split(ranks)
    for step in range(1, ranks):
        exchange(group, send=(pieces[rank], rank + step), receive=(pieces[(rank - step) % ranks], rank - step))


def all_reduce_by_pairs(x, group=None):
    reduce_scatter_by_pairs(x, group)
    all_gather_by_pairs(x, group)


def average_one_by_one(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def average_in_a_bucket_for_each_dtype(model):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        alike = [gradient for gradient in gradients if gradient.dtype == dtype]
        flat = torch.cat([gradient.flatten() for gradient in alike]) / dist.get_world_size()
        collectives.all_reduce(flat)
        for gradient, mean in zip(alike, ddp.unflatten(flat, alike), strict=True):
            gradient.copy_(mean)


def accumulate_and_scale_at_the_end(model, micro_batches):
    for i, micro_batch in enumerate(micro_batches):
        with contextlib.nullcontext() if i == len(micro_batches) - 1 else model.no_sync():
            model(*micro_batch).backward()
    model.sync()
    for p in model.parameters():
        if p.grad is not None:
            p.grad /= len(micro_batches)


def small_buckets(model):
    return ddp.Bucketed(model, bucket_bytes=500)


class NextBucket(ddp.Overlapped):
    """Counts what a bucket still lacks, and starts by itself."""

    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if not self.syncing:
            return
        bucket.waiting_for.discard(p)
        while len(self.works) < len(self.buckets) and not self.buckets[len(self.works)].waiting_for:
            flat = self.buckets[len(self.works)].flat
            self.works.append(self.all_reduce(flat, group=self.group, async_op=True))


class BeforehandDivided(ddp.Overlapped):
    """Each bucket is divided before it is sent."""

    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                break
            bucket.flat /= self.ranks
            self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))

    def average(self):
        for bucket in self.buckets:
            for p in list(bucket.waiting_for):
                self.gradient_ready(p)
        for bucket, work in zip(self.buckets, self.works, strict=True):
            work.wait()
            bucket.waiting_for = set(bucket.views)
        self.works = []


RIGHT = [
    ("broadcast", collectives.broadcast),
    ("broadcast", broadcast_from_far),
    ("reduce_scatter", collectives.reduce_scatter),
    ("reduce_scatter", reduce_scatter_by_pairs),
    ("reduce_scatter", reduce_scatter_the_other_way_round),
    ("all_gather", collectives.all_gather),
    ("all_gather", all_gather_by_pairs),
    ("all_gather", all_gather_in_turns),
    ("all_reduce", collectives.all_reduce),
    ("all_reduce", all_reduce_by_pairs),
    ("average_gradients", average_one_by_one),
    ("average_gradients", average_in_a_bucket_for_each_dtype),
    ("accumulation", accumulate),
    ("accumulation", accumulate_and_scale_at_the_end),
    ("data_parallel", ddp.Naive),
    ("data_parallel", small_buckets),
    ("data_parallel", ddp.Overlapped),
    ("data_parallel", native.ddp),
    ("data_parallel", Wrapper),
    ("buckets", partial(ddp.Bucketed, bucket_bytes=128 * 1024)),
    ("buckets", InBuckets),
    ("overlap", ddp.Overlapped),
    ("overlap", NextBucket),
    ("overlap", BeforehandDivided),
]


@pytest.mark.parametrize("name", CHECKS)
def test_right_answers_are_accepted(name):
    functions = [fn for check_of, fn in RIGHT if check_of == name]
    for fn, answer in zip(functions, together([(name, (fn,), False) for fn in functions]), strict=True):
        assert answer.ok is True and answer, f"{fn}: {answer}"
        assert str(answer) == LINES[name]


LINES = {
    "broadcast": "✓ broadcast: 2 rounds on 4 ranks; the least possible is 2",
    "reduce_scatter": "✓ reduce_scatter: you sent 0.75 × the tensor per rank; the least possible is 0.75 ×",
    "all_gather": "✓ all_gather: you sent 0.75 × the tensor per rank; the least possible is 0.75 ×",
    "all_reduce": "✓ all_reduce: you sent 1.50 × the tensor per rank; the least possible is 1.50 ×",
    "average_gradients": ("✓ average_gradients: you sent 1.50 × the gradients per rank; the least possible is 1.50 ×"),
    "accumulation": (
        "✓ accumulation: you sent 1.50 × the gradients per rank and step, for 4 micro-batches; "
        "the least possible is 1.50 ×"
    ),
    "data_parallel": ("✓ data_parallel: you sent 1.50 × the gradients per rank and step; the least possible is 1.50 ×"),
    "buckets": "✓ buckets: you sent 1.50 × the gradients per rank and step; the least possible is 1.50 ×",
    "overlap": "✓ overlap: 4 of 4 all-reduces begin during backward, and nobody waits there",
}


# ---- not yet ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHECKS)
def test_an_untouched_stub_is_not_yet(name):
    def stub(*args, **kwargs):
        raise NotImplementedError("your turn")

    answer = getattr(check, name)(stub)
    assert answer.ok is None and not answer
    assert str(answer) == f"not yet: {name} (the stub is untouched; the notebook goes on with the course's own)"


def test_a_stub_inside_of_a_wrapper_is_not_yet():
    class Stub(Wrapper):
        def sync(self):
            raise NotImplementedError("your turn")

    assert check.data_parallel(Stub).ok is None


def test_another_not_implemented_error_is_a_mistake():
    def fn(x, group=None):
        raise NotImplementedError("could not run 'aten::add'")

    assert check.all_gather(fn).ok is False


# ---- wrong answers ---------------------------------------------------------------------------------------


def test_one_vector_of_the_larger_dtype_is_no_weight_reduced_twice():
    """With these numbers it takes as many bytes more."""
    assert check.average_gradients(average_in_one_vector, seed=539503).mistake == "too many bytes"


@pytest.mark.parametrize("name", CHECKS)
def test_wrong_answers_are_called_by_their_names(name):
    assert sum(answer.check == name for answer in ANSWERS) >= 8
    assert let_past(name) == ""


# ---- what goes wrong in other ways -----------------------------------------------------------------------


def test_where_gradients_cancel_out_rounding_is_no_mistake():
    """Their mean is small, and their rounding is as large as ever."""

    def average(found):
        facts = ({"plain": [{"scale": torch.tensor(own)}], "before": {"scale": found}} for own in (1.0, -0.9998))
        done = [Done(values={"scale": found}, facts=each) for each in facts]
        return Gradient(Seen(World(0, 2), done, []), 0, "scale")

    assert average(torch.tensor(1e-4 + 1e-8)).right and not average(torch.tensor(2e-4)).right


def test_what_it_raises_is_told_with_its_line():
    def fn(x, group=None):
        pieces = x.tensor_split(dist.get_world_size(group))
        return pieces[len(pieces)]

    answer = check.reduce_scatter(fn)
    assert answer.ok is False
    assert "IndexError" in str(answer) and "return pieces[len(pieces)]" in str(answer)
    assert "float64" in answer.text  # with which input


@pytest.mark.parametrize(
    "kind, said, question",
    [
        ("raised", "rank 0 of 2 failed: NameError: name 'math' is not defined", "This name is not known"),
        ("raised", "rank 0 of 2 failed: TypeError: 'tuple' object does not support item assignment", "What type does"),
        ("raised", "rank 0 of 2 failed: AttributeError: 'tuple' object has no attribute 'add_'", "What type does"),
        ("raised", "rank 0 of 2 failed: TypeError: fn() got an unexpected keyword argument 'group'", "Which arguments"),
        ("raised", "rank 0 of 2 failed: ValueError: TypeError: no", "What does this line assume"),
        ("mismatch", "rank 0 called all_reduce float32[4], rank 1 called all_reduce float64[4]", "The elements are"),
        ("mismatch", "rank 0 called all_reduce float32[4], rank 1 called all_reduce float64[5]", "How large"),
        ("mismatch", "rank 0 called broadcast int64[2] from 0, rank 1 called broadcast int64[2] from 1", "Which ranks"),
    ],
)
def test_what_a_failed_job_is_asked(kind, said, question):
    assert failed(RankError(kind, (0,), said, []), "on 2 ranks").answer.question.startswith(question)


def test_a_tree_that_tells_ranks_that_do_not_exist():
    """Its question is about them, and the learner's line comes before the one of `exchange`."""
    answer = check.broadcast(wrong_collectives.broadcast_doubling_only)
    assert answer.mistake == "right only when the number of ranks is a power of two"
    assert answer.question.endswith("Is there a rank with that number?")
    assert re.search(
        r"   collectives\.py line \d+: exchange\(.*  \(in collectives\.py line \d+: for work in", answer.text
    )


def test_a_hang_is_told_with_its_line():
    def fn(x, group=None):
        if dist.get_rank(group) != 1:
            dist.recv(x, group=group, group_src=1)

    answer = check.all_reduce(fn)
    assert answer.mistake == "one side of a message or a collective is missing"
    assert "rank 1 returned" in answer.text and "dist.recv(x, group=group, group_src=1)" in answer.text


def test_one_that_ends_the_process():
    def fn(model):
        sys.exit(3)

    assert "exit(3)" in check.average_gradients(fn).text


@pytest.mark.skipif(sys.platform != "linux", reason="no other system keeps to the limit")
def test_far_too_much_memory_is_refused_with_its_line():
    """Nothing is written to it: without the limit it would not be taken from anybody."""

    def fn(elements, ranks, rank, gigabytes):
        torch.empty(gigabytes << 30, dtype=torch.uint8)
        return 0, 0

    answers = [check.my_shard(partial(fn, gigabytes=size)) for size in (1, 3)]
    assert [answer.mistake == "far too much memory" for answer in answers] == [False, True]
    assert "can't allocate memory" in answers[1].text and "torch.empty(gigabytes << 30" in answers[1].text


@pytest.mark.parametrize("given", [None, 3, torch.ones(2)], ids=["None", "3", "a tensor"])
def test_something_that_is_no_function(given):
    answer = check.broadcast(given)
    assert answer.ok is False and "not a function" in answer.text


def test_one_that_cannot_be_sent_to_the_ranks():
    lock = threading.Lock()
    answer = check.all_gather(lambda x, group=None: lock.acquire())
    assert answer.ok is False and "variable 'lock'" in answer.text


def test_returned_of_a_wrong_type():
    def fn(x, group=None):
        collectives.reduce_scatter(x, group=group)
        return x.tolist()

    assert "returned a list" in check.reduce_scatter(fn).text


def test_a_changed_dtype():
    answer = check.reduce_scatter(lambda x, group=None: collectives.reduce_scatter(x, group=group).float())
    assert answer.mistake == "the dtype changed"


def test_the_same_seed_gives_the_same_answer():
    def fn(x, group=None):
        x += 1

    first, again, other = (check.all_reduce(fn, seed=seed) for seed in (5, 5, 6))
    assert str(first) == str(again) and first.text != other.text


def test_replicas_that_differ_may_be_refused():
    """An error is as right as making them equal."""

    class Refuses(Wrapper):
        def make_equal(self):
            agree.require_equal_replicas(self.module)

    assert check.data_parallel(Refuses).ok


def test_a_flag_for_each_parameter_is_no_waste():
    """Finding out who used which parameter costs a few bytes; None stays None where nobody did."""
    answer = check.data_parallel(lambda model: ddp.Overlapped(model, find_unused=True))
    assert answer.ok and answer.text.endswith("the least possible is 1.50 ×")


# ---- answers and predictions -----------------------------------------------------------------------------


def test_a_prediction():
    assert check.predict("How many?", None, answer=4).ok is None
    assert check.predict("How many?", 4, answer=4).ok
    assert check.predict("How many?", 4.1, answer=4).ok
    wrong = check.predict("How many?", 5, answer=4, unit="B", reason="Two for each of two.")
    assert str(wrong) == "✗ predict: How many? 4 B. You said 5 B. Two for each of two."
    assert str(check.predict("How many?", 4, answer=4, unit="B")) == "✓ predict: How many? 4 B."
    assert "4" not in str(check.predict("How many?", None, answer=4))
    assert check.predict("How many?", "four", answer=4).ok is False
    assert check.predict("How many?", 0, answer=0, tolerance=0).ok


def test_the_page_shows_the_same_words():
    answer = check.predict("Is 1 < 2 & 3?", 1, answer=2)
    page = answer._repr_html_()
    assert "Is 1 &lt; 2 &amp; 3?" in page and "You said 1." in page


def test_a_module_that_is_no_wrapper():
    answer = check.data_parallel(lambda model: nn.Linear(1, 1))
    assert answer.mistake == "not a wrapper" and "no_sync" in answer.text
