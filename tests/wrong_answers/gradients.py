"""Wrong answers to the exercises of notebook 03, and the right ones that some of them spoil."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from labs import ddp
from tests.wrong_answers.answers import wrong

# ---- average_gradients -----------------------------------------------------------------------------------


def gradients(model):
    return [p for p in model.parameters() if p.grad is not None]


@wrong("average_gradients", "nothing synchronised")
def average_nothing(model):
    for p in gradients(model):
        p.grad /= 1


@wrong("average_gradients", "summed instead of averaged")
def average_by_a_sum(model):
    for p in gradients(model):
        dist.all_reduce(p.grad)


@wrong("average_gradients", "parameters averaged instead of gradients")
def average_the_parameters(model):
    for p in gradients(model):
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


@wrong("average_gradients", "divided by the wrong number")
def average_over_four(model):
    for p in gradients(model):
        dist.all_reduce(p.grad)
        p.grad /= 4


@wrong("average_gradients", "averaged twice")
def average_twice(model):
    for p in gradients(model):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("average_gradients", "the mean does not reach .grad")
def average_a_copy(model):
    for p in gradients(model):
        mean = p.grad / dist.get_world_size()
        dist.all_reduce(mean)


@wrong("average_gradients", "a tied weight reduced twice")
def average_by_name(model):
    for _, p in model.named_parameters(remove_duplicate=False):
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients", "a tied weight reduced twice")
def average_by_name_and_divide_once(model):
    for _, p in model.named_parameters(remove_duplicate=False):
        if p.grad is not None:
            dist.all_reduce(p.grad)
    for p in gradients(model):
        p.grad /= dist.get_world_size()


@wrong("average_gradients", "a frozen parameter has a gradient")
def average_with_frozen(model):
    for p in model.parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@wrong("average_gradients", "zeros where nobody has a gradient")
def average_with_zeros(model):
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients", "one rank's gradient everywhere")
def average_by_broadcast(model):
    for p in gradients(model):
        dist.broadcast(p.grad, 0)


@wrong("average_gradients", "right on some ranks only")
def average_at_rank_0(model):
    for p in gradients(model):
        mean = p.grad / dist.get_world_size()
        dist.reduce(mean, 0)
        if dist.get_rank() == 0:
            p.grad = mean


@wrong("average_gradients", "some parameters are left out")
def average_the_matrices(model):
    for p in gradients(model):
        if p.ndim > 1:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients", "rounded on the way")
def average_in_float32(model):
    for p in gradients(model):
        mean = p.grad.float()
        dist.all_reduce(mean)
        p.grad.copy_(mean / dist.get_world_size())


@wrong("average_gradients", "too many bytes")
def average_by_gathering(model):
    for p in gradients(model):
        all_of_them = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(all_of_them, p.grad)
        p.grad = torch.stack(all_of_them).mean(0)


@wrong("average_gradients", "too many bytes")
def average_in_one_vector(model):
    """Where dtypes are mixed, it has the largest one's."""
    grads = [p.grad for p in gradients(model)]
    flat = torch.cat([g.flatten() for g in grads])
    dist.all_reduce(flat)
    for g, mean in zip(grads, ddp.unflatten(flat / dist.get_world_size(), grads), strict=True):
        g.copy_(mean)


@wrong("average_gradients", "buffers are sent")
def average_buffers_too(model):
    average_right(model)
    for buffer in model.buffers():
        dist.all_reduce(buffer)
        buffer /= dist.get_world_size()


@wrong("average_gradients", "one rank does the work for all")
def average_at_rank_0_and_tell_all(model):
    for p in gradients(model):
        dist.reduce(p.grad, 0)
        dist.broadcast(p.grad, 0)
        p.grad /= dist.get_world_size()


@wrong("average_gradients", "nobody waited")
def average_without_waiting(model):
    for p in gradients(model):
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad, async_op=True)


@wrong("average_gradients")
def average_the_transposed(model):
    average_right(model)
    for p in gradients(model):
        if p.ndim == 2 and p.shape[0] == p.shape[1]:
            p.grad = p.grad.T


@wrong("average_gradients", "requires_grad has changed")
def average_and_thaw(model):
    average_right(model)
    model.requires_grad_(True)


@wrong("average_gradients", "some parameters are left out")
def average_all_that_has_dimensions(model):
    for p in gradients(model):
        if p.ndim:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients", "hooks are left behind")
def average_and_hang_a_hook_on_it(model):
    average_right(model)
    for p in gradients(model):
        p.register_hook(lambda gradient: gradient)


@wrong("average_gradients", "no longer in training mode")
def average_in_evaluation_mode(model):
    average_right(model.eval())


@wrong("average_gradients", "something is kept from every step")
def average_and_remember(model, history=[]):  # noqa: B006
    average_right(model)
    history.append([p.grad.clone() for p in gradients(model)])


@wrong("average_gradients", "something is kept from every step")
def average_and_hold_on_to_them(model, history=[]):  # noqa: B006
    average_right(model)
    history.append([p.grad for p in gradients(model)])


@wrong("average_gradients", "not in place")
def average_into_another_tensor(model):
    for p in gradients(model):
        dist.all_reduce(p.grad)
        p.grad = p.grad / dist.get_world_size()


@wrong("average_gradients", "the ranks make different calls", alone=True)
def average_what_is_not_zero(model):
    """Zero here may be something else on another rank."""
    for p in gradients(model):
        if p.grad.any() or not p.grad.numel():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients", "some parameters are left out")
def average_what_was_used_at_first(model):
    if not hasattr(model, "used"):
        model.used = [name for name, p in model.named_parameters() if p.grad is not None]
    for name in model.used:
        p = model.get_parameter(name)
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("average_gradients", "nothing synchronised")
def average_in_training_mode(model):
    if model.training:
        average_right(model)


def average_right(model):
    for p in gradients(model):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


# ---- accumulation ----------------------------------------------------------------------------------------


@wrong("accumulation", "the loss is not divided by the number of micro-batches")
def accumulate_without_division(model, micro_batches):
    with model.no_sync():
        for micro_batch in micro_batches[:-1]:
            model(*micro_batch).backward()
    model(*micro_batches[-1]).backward()
    model.sync()


@wrong("accumulation", "synchronised at every micro-batch")
def accumulate_with_every_sync(model, micro_batches):
    for micro_batch in micro_batches:
        (model(*micro_batch) / len(micro_batches)).backward()
        model.sync()


@wrong("accumulation", "nothing synchronised")
def accumulate_without_sync(model, micro_batches):
    for micro_batch in micro_batches:
        with model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()


@wrong("accumulation", "nothing synchronised")
def accumulate_and_sync_inside(model, micro_batches):
    with model.no_sync():
        for micro_batch in micro_batches:
            (model(*micro_batch) / len(micro_batches)).backward()
        model.sync()


@wrong("accumulation", "only the first micro-batch is synchronised")
def accumulate_after_sync(model, micro_batches):
    for i, micro_batch in enumerate(micro_batches):
        with contextlib.nullcontext() if i == 0 else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()
            if i == 0:
                model.sync()


@wrong("accumulation", "only the last micro-batch counts")
def accumulate_nothing(model, micro_batches):
    for i, micro_batch in enumerate(micro_batches):
        model.zero_grad()
        with contextlib.nullcontext() if i == len(micro_batches) - 1 else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()
    model.sync()


@wrong("accumulation", "the graphs of all micro-batches are kept")
def accumulate_the_losses(model, micro_batches):
    with model.no_sync():
        losses = [model(*micro_batch) for micro_batch in micro_batches[:-1]]
    (sum(losses, model(*micro_batches[-1])) / len(micro_batches)).backward()
    model.sync()


@wrong("accumulation", "only the last micro-batch is synchronised")
def accumulate_the_last_only(model, micro_batches):
    before = {}
    for i, micro_batch in enumerate(micro_batches):
        last = i == len(micro_batches) - 1
        if last:
            before = {p: p.grad for p in model.parameters()}
            model.zero_grad()
        with contextlib.nullcontext() if last else model.no_sync():
            (model(*micro_batch) / len(micro_batches)).backward()
    model.sync()
    for p, gradient in before.items():
        if gradient is not None:
            p.grad += gradient


@wrong("accumulation", "divided by the number of micro-batches twice")
def accumulate_and_divide_twice(model, micro_batches):
    accumulate(model, micro_batches)
    for p in gradients(model):
        p.grad /= len(micro_batches)


@wrong("accumulation", "the gradient is zero")
def accumulate_and_step_too_early(model, micro_batches):
    accumulate(model, micro_batches)
    model.zero_grad(set_to_none=False)


@wrong("accumulation")
def accumulate_in_evaluation_mode(model, micro_batches):
    """So that no running statistics change, but in the last one."""
    *first, last = micro_batches
    before = model.training
    with model.eval().no_sync():
        for micro_batch in first:
            (model(*micro_batch) / len(micro_batches)).backward()
    (model.train(before)(*last) / len(micro_batches)).backward()
    model.sync()


@wrong("accumulation", "the parameters have changed")
def accumulate_and_step(model, micro_batches):
    accumulate(model, micro_batches)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@wrong("accumulation")
def accumulate_in_all_but_the_last(model, micro_batches):
    accumulate(model, micro_batches[:-1] or micro_batches)


@wrong("accumulation", "something is left behind")
def accumulate_with_a_seed(model, micro_batches):
    torch.manual_seed(0)
    accumulate(model, micro_batches)


@wrong("accumulation", "forward outside of no_sync()")
def accumulate_with_forward_outside(model, micro_batches):
    for i, micro_batch in enumerate(micro_batches):
        loss = model(*micro_batch) / len(micro_batches)
        with contextlib.nullcontext() if i == len(micro_batches) - 1 else model.no_sync():
            loss.backward()
    model.sync()


@wrong("accumulation", "the last backward is within no_sync()")
def accumulate_all_within(model, micro_batches):
    with model.no_sync():
        for micro_batch in micro_batches:
            (model(*micro_batch) / len(micro_batches)).backward()
    model.sync()


@wrong("accumulation", "the caller's list has changed")
def accumulate_and_pop(model, micro_batches):
    n, last = len(micro_batches), micro_batches.pop()
    with model.no_sync():
        for micro_batch in micro_batches:
            (model(*micro_batch) / n).backward()
    (model(*last) / n).backward()
    model.sync()


@wrong("accumulation")
def accumulate_until_it_is_the_last(model, micro_batches):
    """The same micro-batch may come twice."""
    for x, y in micro_batches:
        with contextlib.nullcontext() if x is micro_batches[-1][0] else model.no_sync():
            (model(x, y) / len(micro_batches)).backward()
    model.sync()


@wrong("accumulation", "too many bytes")
def accumulate_and_tell_the_loss(model, micro_batches):
    accumulate(model, micro_batches)
    for _ in micro_batches:
        dist.all_reduce(torch.zeros(()))


def accumulate(model, micro_batches):
    """Right."""
    with model.no_sync():
        for micro_batch in micro_batches[:-1]:
            (model(*micro_batch) / len(micro_batches)).backward()
    (model(*micro_batches[-1]) / len(micro_batches)).backward()
    model.sync()


# ---- data_parallel ---------------------------------------------------------------------------------------


class Wrapper(nn.Module):
    """A right one, which those below spoil in one method each: hooks, and replicas made equal."""

    def __init__(self, model):
        super().__init__()
        self.module, self.syncing, self.works = model, True, []
        self.make_equal()
        for p in self.trained():
            p.register_post_accumulate_grad_hook(self.ready)

    def trained(self):
        return [p for p in self.module.parameters() if p.requires_grad]

    def make_equal(self):
        for p in self.module.parameters():
            dist.broadcast(p.data, 0)

    def forward(self, *args):
        return self.module(*args)

    def ready(self, p):
        if self.syncing:
            p.grad /= dist.get_world_size()
            self.works.append(dist.all_reduce(p.grad, async_op=True))

    @contextlib.contextmanager
    def no_sync(self):
        self.syncing = False
        yield
        self.syncing = True

    def sync(self):
        if any(p.grad is None for p in self.trained()):
            raise RuntimeError("a parameter has no gradient")
        for work in self.works:
            work.wait()
        self.works = []


@wrong("data_parallel", "parameters averaged instead of gradients")
class AveragesTheParameters(Wrapper):
    def ready(self, p):
        if self.syncing:
            p.data /= dist.get_world_size()
            dist.all_reduce(p.data)


@wrong("data_parallel", "only the last micro-batch is synchronised")
class HooksTheTensor(Wrapper):
    """Tensor.register_hook sees the gradient of this backward, before it is added to what is there."""

    def __init__(self, model):
        super().__init__(model)
        for p in self.trained():
            p.register_hook(self.average)

    def ready(self, p):
        pass

    def average(self, gradient):
        if self.syncing:
            gradient = gradient / dist.get_world_size()
            dist.all_reduce(gradient)
        return gradient


@wrong("data_parallel", "a replica that started from another seed")
class TrustsTheSeeds(Wrapper):
    def make_equal(self):
        pass


@wrong("data_parallel", "summed instead of averaged")
class Sums(Wrapper):
    def ready(self, p):
        if self.syncing:
            self.works.append(dist.all_reduce(p.grad, async_op=True))


@wrong("data_parallel", "synchronised at every micro-batch")
class NeverPauses(Wrapper):
    def ready(self, p):
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()

    @contextlib.contextmanager
    def no_sync(self):
        yield


@wrong("data_parallel", "nothing synchronised")
class Plain(Wrapper):
    def ready(self, p):
        pass


@wrong("data_parallel", "a tied weight reduced twice")
class LoopsOverModules(Wrapper):
    def ready(self, p):
        pass

    def sync(self):
        for module in self.module.modules():
            for p in module.parameters(recurse=False):
                if p.requires_grad:
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()


@wrong("data_parallel", "frozen parameters are sent")
class SendsTheFrozen(Wrapper):
    def sync(self):
        super().sync()
        for p in self.module.parameters():
            if not p.requires_grad:
                dist.all_reduce(torch.zeros_like(p))


@wrong("data_parallel", "not a wrapper")
def forgets_to_return(model):
    Wrapper(model)


@wrong("data_parallel", "not a wrapper")
class HasNoPause(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.module = DistributedDataParallel(model)

    def forward(self, *args):
        return self.module(*args)


@wrong("data_parallel")
class StaysPaused(Wrapper):
    @contextlib.contextmanager
    def no_sync(self):
        self.syncing = False
        yield


@wrong("data_parallel", "zeros where nobody has a gradient")
class FillsWithZeros(Wrapper):
    def ready(self, p):
        pass

    def sync(self):
        if not self.syncing:
            return
        for p in self.trained():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


@wrong("data_parallel")
class ReusesTheFirstBucket(Wrapper):
    """The flat buffer is filled in the first step only."""

    flat = None

    def ready(self, p):
        pass

    def sync(self):
        if any(p.grad is None for p in self.trained()):
            raise RuntimeError("a parameter has no gradient")
        if self.flat is None:
            self.flat = torch.cat([p.grad.flatten() for p in self.trained()])
            dist.all_reduce(self.flat)
            self.flat /= dist.get_world_size()
        for p, mean in zip(self.trained(), ddp.unflatten(self.flat, self.trained()), strict=True):
            p.grad.copy_(mean)


@wrong("data_parallel", "nobody waited")
class NeverWaits(Wrapper):
    def sync(self):
        if any(p.grad is None for p in self.trained()):
            raise RuntimeError("a parameter has no gradient")
        self.works = []


@wrong("data_parallel", "full copies are kept")
class KeepsTheHistory(Wrapper):
    def sync(self):
        super().sync()
        self.history = [[p.grad.clone() for p in self.trained()] for _ in range(4)]


@wrong("data_parallel", "a replica that started from another seed")
class EqualisesWhatIsTrained(Wrapper):
    """A frozen parameter takes part in the forward, too."""

    def make_equal(self):
        for p in self.trained():
            dist.broadcast(p.data, 0)


@wrong("data_parallel", "a different loss")
class AveragesTheLoss(Wrapper):
    def forward(self, *args):
        loss = self.module(*args)
        return loss / dist.get_world_size()


@wrong("data_parallel", "hooks are left behind")
class HangsAHookOnEveryForward(Wrapper):
    def forward(self, *args):
        for p in self.trained():
            p.register_post_accumulate_grad_hook(lambda p: None)
        return self.module(*args)


@wrong("data_parallel", "no longer in training mode")
class EvaluatesTheModel(Wrapper):
    def forward(self, *args):
        return self.module.eval()(*args)


@wrong("data_parallel", "other parameters than the model had")
class StartsFromZeros(Wrapper):
    """Equal on every rank, and no longer the model that was handed over."""

    def make_equal(self):
        for p in self.module.parameters():
            p.data.zero_()


@wrong("data_parallel", "other parameters than the model had")
class AddsUpTheReplicas(Wrapper):
    def make_equal(self):
        for p in self.module.parameters():
            dist.all_reduce(p.data)


@wrong("data_parallel", "something is kept from every step")
class KeepsItsWorks(Wrapper):
    """Each of them holds the gradient that it reduced."""

    def sync(self):
        works = self.works
        super().sync()
        self.works = works


@wrong("data_parallel", "something is kept from every step")
class KeepsItsWorksElsewhere(Wrapper):
    everybodys = []  # noqa: RUF012

    def ready(self, p):
        super().ready(p)
        self.everybodys.append(p.grad)


# ---- buckets ---------------------------------------------------------------------------------------------


class InBuckets(ddp.DataParallel):
    """A right one, which those below spoil."""

    def average(self):
        for bucket in ddp.in_buckets(self.trainable.values(), 128 * 1024):
            self.average_bucket(bucket)

    def average_bucket(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        self.add_up(flat)
        self.copy_back(flat, bucket)

    def add_up(self, flat):
        self.all_reduce(flat, group=self.group)
        flat /= self.ranks

    def copy_back(self, flat, bucket):
        for p, mean in zip(bucket, ddp.unflatten(flat, bucket), strict=True):
            p.grad.copy_(mean)


@wrong("buckets", "summed instead of averaged")
class DividesTooLate(InBuckets):
    def average_bucket(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket])
        self.all_reduce(flat, group=self.group)
        self.copy_back(flat, bucket)
        flat /= self.ranks


@wrong("buckets", "wrong in a group of only some ranks")
class AmongAll(InBuckets):
    def add_up(self, flat):
        self.all_reduce(flat)
        flat /= self.ranks


@wrong("buckets", "wrong in a group of only some ranks")
class DividesByAll(InBuckets):
    def add_up(self, flat):
        self.all_reduce(flat, group=self.group)
        flat /= dist.get_world_size()


@wrong("buckets", "not with its own all-reduce")
class ByTorch(InBuckets):
    def add_up(self, flat):
        dist.all_reduce(flat, group=self.group)
        flat /= self.ranks


@wrong("buckets", "not in place")
class ViewsOfTheBucket(InBuckets):
    def copy_back(self, flat, bucket):
        for p, mean in zip(bucket, ddp.unflatten(flat, bucket), strict=True):
            p.grad = mean


@wrong("buckets", "some parameters are left out")
class IntoACopy(InBuckets):
    """`reshape` copies where it cannot view."""

    def copy_back(self, flat, bucket):
        for p, mean in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad.reshape(-1).copy_(mean)


@wrong("buckets", "not one all-reduce for each bucket")
class OneByOne(InBuckets):
    def average_bucket(self, bucket):
        for p in bucket:
            super().average_bucket([p])


@wrong("buckets", "not one all-reduce for each bucket")
class AllInOne(InBuckets):
    def average(self):
        for bucket in ddp.in_buckets(self.trainable.values(), 2**40):
            self.average_bucket(bucket)


@wrong("buckets", "too many bytes")
class CountsTheRanks(InBuckets):
    """By a number more in each bucket."""

    def average_bucket(self, bucket):
        flat = torch.cat([p.grad.flatten() for p in bucket] + [torch.ones_like(bucket[0].grad.flatten()[:1])])
        self.all_reduce(flat, group=self.group)
        self.copy_back(flat[:-1] / flat[-1], bucket)


@wrong("buckets", "the ranks make different calls", alone=True)
class SkipsZeros(InBuckets):
    """Zeros here may be something else on another rank."""

    def average_bucket(self, bucket):
        if any(p.grad.any() for p in bucket):
            super().average_bucket(bucket)


@wrong("buckets", "synchronised at every micro-batch")
class SyncsAlways(InBuckets):
    def sync(self):
        self.average()


@wrong("buckets", "nothing synchronised")
class WhenTraining(InBuckets):
    def average(self):
        if self.training:
            super().average()


# ---- overlap ---------------------------------------------------------------------------------------------


@wrong("overlap", "gradients are held outside their buckets")
class CollectsAtTheEnd(ddp.Overlapped):
    def gradient_ready(self, p):
        if self.syncing:
            super().gradient_ready(p)


@wrong("overlap", "wrong in a group of only some ranks")
class OverlapsAmongAll(ddp.Overlapped):
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(self.all_reduce(bucket.flat, async_op=True))


@wrong("overlap", "not with its own all-reduce")
class OverlapsByTorch(ddp.Overlapped):
    def start_full_buckets(self):
        for bucket in self.buckets[len(self.works) :]:
            if bucket.waiting_for:
                return
            self.works.append(dist.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap", "nothing is sent during backward")
class AfterBackward(ddp.Overlapped):
    def gradient_ready(self, p):
        pass

    def average(self):
        for p in self.trainable.values():
            super().gradient_ready(p)
        super().average()


@wrong("overlap", "waited for during backward")
class WaitsAtOnce(ddp.Overlapped):
    def start_full_buckets(self):
        begun = len(self.works)
        super().start_full_buckets()
        for work in self.works[begun:]:
            work.wait()


@wrong("overlap", "waited for during backward")
class WaitsAtTheEndOfBackward(ddp.Overlapped):
    def gradient_ready(self, p):
        super().gradient_ready(p)
        for work in self.works if len(self.works) == len(self.buckets) else ():
            work.wait()


@wrong("overlap", "a full bucket lies idle")
class AllAtOnce(ddp.Overlapped):
    def start_full_buckets(self):
        if not any(bucket.waiting_for for bucket in self.buckets):
            super().start_full_buckets()


@wrong("overlap", "a bucket's all-reduce never begins")
class OneAtATime(ddp.Overlapped):
    """Those that were full before their turn are forgotten."""

    def start_full_buckets(self):
        begun = len(self.works)
        if begun < len(self.buckets) and not self.buckets[begun].waiting_for:
            self.works.append(self.all_reduce(self.buckets[begun].flat, group=self.group, async_op=True))


@wrong("overlap", "more works than buckets")
class UsesThemUp(ddp.Overlapped):
    def start_full_buckets(self):
        while self.buckets and not self.buckets[0].waiting_for:
            flat = self.buckets.pop(0).flat
            self.works.append(self.all_reduce(flat, group=self.group, async_op=True))


@wrong("overlap", "some buckets begin after backward")
class LeavesTheLast(ddp.Overlapped):
    def gradient_ready(self, p):
        if p is next(iter(self.trainable.values())) and torch._C._current_graph_task_id() != -1:
            return
        super().gradient_ready(p)


@wrong("overlap", "not one all-reduce for each bucket")
class GradientByGradient(Wrapper):
    def __init__(self, model, bucket_bytes):
        super().__init__(model)


@wrong("overlap", "buckets begin in different orders on different ranks", alone=True)
class WhicheverIsFull(ddp.Overlapped):
    def gradient_ready(self, p):
        bucket = self.bucket_of[p]
        bucket.collect(p)
        if self.syncing:
            bucket.waiting_for.remove(p)
            if not bucket.waiting_for:
                self.works.append(self.all_reduce(bucket.flat, group=self.group, async_op=True))


@wrong("overlap", "buckets begin in different orders on different ranks", alone=True)
class AsTheyFill(ddp.Overlapped):
    def __init__(self, model, bucket_bytes):
        super().__init__(model, bucket_bytes=bucket_bytes)
        self.begun = set()

    def start_full_buckets(self):
        for bucket in self.buckets:
            if not bucket.waiting_for and bucket not in self.begun:
                self.begun.add(bucket)
                self.works.append(self.all_reduce(bucket.flat, async_op=True))

    def average(self):
        for bucket in self.buckets:
            for p in list(bucket.waiting_for):
                self.gradient_ready(p)
        for work in self.works:
            work.wait()
        for bucket in self.buckets:
            bucket.flat /= self.ranks
            bucket.waiting_for = set(bucket.views)
        self.works, self.begun = [], set()


@wrong("overlap", "a bucket begins before it is full")
class BeforeItIsFull(ddp.Overlapped):
    def start_full_buckets(self):
        if len(self.works) < len(self.buckets):
            self.works.append(self.all_reduce(self.buckets[len(self.works)].flat, async_op=True))


@wrong("overlap")
class OnlyOnce(ddp.Overlapped):
    """Its buckets wait for nothing in the second step."""

    def average(self):
        for bucket, work in zip(self.buckets, self.works, strict=True):
            work.wait()
            bucket.flat /= self.ranks
        self.works = []


@wrong("overlap", "synchronised at every micro-batch")
class WithinNoSync(ddp.Overlapped):
    @contextlib.contextmanager
    def no_sync(self):
        yield
        self.sync()


@wrong("overlap", "summed instead of averaged")
class NeverDivides(ddp.Overlapped):
    def average(self):
        super().average()
        for bucket in self.buckets:
            bucket.flat *= self.ranks


@wrong("overlap", "nobody waited")
class NobodyWaits(ddp.Overlapped):
    def average(self):
        for bucket in self.buckets:
            bucket.flat /= self.ranks
            bucket.waiting_for = set(bucket.views)
        self.works = []
