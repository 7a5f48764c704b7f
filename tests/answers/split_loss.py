"""Answers to an exercise of notebook 09b: a loss whose vocabulary is split."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn import functional as differentiable  # noqa: F401 (it stands in words that are exchanged)

from tests.answers import Exercise, exchanged
from tests.answers.conjugate import as_is, border, reduce, summed  # noqa: F401 (as above)

# fmt: off
answers = Exercise("split_loss")
NONE = "none backward; 3 are enough for any vocabulary"


def target_column(logits, targets, first):
    """Beyond this rank's own, a column of -inf for those that others have."""
    here = (targets >= first) & (targets < first + logits.shape[1])
    column = (targets - first).where(here, logits.shape[1])
    return here, column, F.pad(logits, (0, 1), value=-torch.inf)


def top(logits, group):
    highest = logits.detach().amax(1)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return highest


@answers.right(line=f"you sent 3.00 numbers per token forward and {NONE}", blind=True)
def in_two(logits, targets, first, group=None):
    here, column, padded = target_column(logits, targets, first)
    shifted = padded - top(padded, group)[:, None]
    picked = shifted.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(shifted.exp().sum(1), group), reduce(picked, group)
    return (total.log() - target).mean()


@answers.right(blind=True, long=True)
def in_three(logits, targets, first, group=None):
    here, column, logits = target_column(logits, targets, first)
    highest = top(logits, group)
    total = reduce((logits - highest[:, None]).exp().sum(dim=1), group)
    picked = logits[torch.arange(len(targets)), column]
    target = reduce(torch.where(here, picked - highest, 0.0), group)
    return torch.mean(torch.log(total) - target)


@answers.right(blind=True, long=True)
def thousands_of_tokens_at_a_time(logits, targets, first, group=None):
    total = 0
    for some, theirs in zip(logits.split(4096), targets.split(4096), strict=True):
        here, column, some = target_column(some, theirs, first)
        some = some - top(some, group)[:, None]
        picked = torch.take_along_dim(some, column[:, None], 1).squeeze(1).masked_fill(~here, 0)
        sums, picked = reduce(torch.cat([some.exp().sum(1), picked]), group).chunk(2)
        total = total + (sums.log() - picked).sum()
    return total / len(targets)


@answers.right(blind=True)
def without_padding(logits, targets, first, group=None):
    v = logits.shape[1]
    here = (targets >= first) & (targets < first + v)
    highest = logits.detach().amax(1) if v else logits.new_full((len(targets),), -torch.inf)
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    shifted = logits - highest[:, None]
    column = (targets - first).clamp(0, max(0, v - 1))[:, None]
    picked = shifted.gather(1, column)[:, 0].where(here, 0) if v else shifted.sum(1)
    total, target = reduce(torch.stack([shifted.exp().sum(1), picked]), group).unbind()
    return (total.log() - target).sum() / len(targets)


class SplitLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, first, group):
        here, column, padded = target_column(logits, targets, first)
        padded.sub_(top(padded, group)[:, None])
        both = padded.new_zeros(2, len(targets))
        both[1] = padded.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
        padded.exp_()
        both[0] = padded.sum(1)
        dist.all_reduce(both, group=group)
        padded.div_(both[0][:, None])
        ctx.save_for_backward(padded, column)
        ctx.group = group
        return (both[0].log() - both[1]).mean()

    @staticmethod
    def backward(ctx, gradient):
        softmax, column = ctx.saved_tensors
        out = softmax.clone()
        out[torch.arange(len(column)), column] -= 1
        return out[:, :-1] * (gradient / len(column)), None, None, None


def applied(function):
    return lambda logits, targets, first, group=None: function.apply(logits, targets, first, group)


answers.right(blind=True)(applied(SplitLoss))
IN_PLACE = exchanged(SplitLoss, {"softmax.clone()": "softmax"}, "InPlace")
answers.right(long=True)(applied(IN_PLACE))


@answers.right(line=f"you sent 2.02 numbers per token forward and {NONE}")
def of_sums_of_each_rank(logits, targets, first, group=None):
    """Two numbers a token, and one more in all: what is added up over the tokens need not travel for each."""
    here, column, padded = target_column(logits, targets, first)
    own = logits.logsumexp(1) if logits.shape[1] else logits.sum(1) - torch.inf
    highest = own.detach().clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    total = reduce((own - highest).exp(), group).log() + highest
    picked = padded.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    return total.mean() - reduce(picked.mean(), group)


@answers.right(blind=True, long=True)
def by_logsumexp(logits, targets, first, group=None):
    """Through the logs of the ranks' own sums."""
    here, column, padded = target_column(logits, targets, first)
    shifted = padded - top(padded, group)[:, None]
    mine = torch.logsumexp(shifted, 1).exp() if logits.shape[1] else logits.sum(1)
    picked = torch.where(here, shifted.gather(1, column[:, None])[:, 0], 0.0)
    total, target = reduce(torch.stack([mine, picked]), group)
    return (total.log() - target).mean()


@answers.right(long=True)
def in_two_halves(logits, targets, first, group=None):
    halves = zip(logits.chunk(2), targets.chunk(2), strict=True)
    return sum(in_two(*half, first, group) * len(half[1]) for half in halves) / len(targets)


# ---- with other words ------------------------------------------------------------------------------------

TOP, MASK, PICKED = "top(padded, group)[:, None]", ".masked_fill(~here, 0)", "shifted.gather(1, column[:, None])[:, 0]"
SUM, TARGET, END = "reduce(shifted.exp().sum(1), group)", "reduce(picked, group)", "(total.log() - target).mean()"
RANK, RANKS = "dist.get_rank(group)", "dist.get_world_size(group)"
LOW = "padded.detach().amax(1).nan_to_num(neginf=0.0)"  # of this rank alone
INFINITE, GRADIENT, FORM = "not finite", "the right loss with a wrong gradient", "another shape"
MANY, DIVIDE = "more than three numbers per token", "right only where the ranks divide the vocabulary"
TOKENS, GROUP = "summed over the tokens", "right only on the group of all ranks"

spoil = answers.slips(in_two, blind=True)
spoil(INFINITE, {TOP: "0"})
spoil("relative to each rank's own highest logit", {TOP: f"{LOW}[:, None]"})
spoil(INFINITE, {TOP: f"summed({LOW}, group)[:, None]"}, long=True)
spoil(INFINITE, {TOP: f"summed({LOW}, group)[:, None] / {RANKS}"}, blind=False, long=True)
spoil(INFINITE, {TOP: "top(padded, group).max()"})
spoil(GROUP, {TOP: "top(padded, None)[:, None]"})
spoil(GROUP, {SUM: "reduce(shifted.exp().sum(1))", TARGET: "reduce(picked)"})
spoil(TOKENS, {END: "(total.log() - target).sum()"})
spoil("", {PICKED: "padded.gather(1, column[:, None])[:, 0]"})
spoil(INFINITE, {MASK: " * here"}, long=True)
spoil(INFINITE, {MASK: ""}, long=True)
spoil("",
    {PICKED: "padded.gather(1, column[:, None])[:, 0]",
     TARGET: "reduce(picked - top(padded, group), group)"}, long=True)
spoil("a target's logit stays on its rank", {TARGET: "picked"})
spoil(GRADIENT, {SUM: "summed(shifted.exp().sum(1).detach(), group)"})
spoil(GRADIENT, {TARGET: "summed(picked.detach(), group)"}, long=True)
spoil("divided by the tokens of one rank", {END: "(total.log() - target).sum() / here.sum().clamp(min=1)"})
torchs = "differentiable.all_reduce({}, group=group or dist.group.WORLD)"
sums = {SUM: torchs.format("shifted.exp().sum(1)"), TARGET: torchs.format("picked")}
spoil("the gradient is summed as well", sums)
spoil("", {END: f"{END} / 0.6931471805599453"}, long=True)
fourth = "target / reduce(here.to(logits.dtype), group)"
spoil(MANY, {END: f"(total.log() - {fourth}).mean()"})
twice = "top(top(padded, group)[:, None], group)[:, None]"
spoil(MANY, {TOP: twice}, long=True)
spoil("", {"padded = target_column(logits,": "padded = target_column(logits.clamp(-80, 80),", TOP: "0"}, long=True)
spoil("", {END: f"{END} * ({RANK} == 0)"})
spoil(DIVIDE, {"targets, first)": f"targets, {RANK} * logits.shape[1])"})
spoil(FORM, {END: "total.log() - target"}, long=True)
spoil(FORM, {END: "(total.log() - target).mean(0, keepdim=True)"})
spoil("averaged instead of summed", {END: f"{END} / {RANKS}"})
answers.spoil(without_padding, DIVIDE,
    {"logits.detach().amax(1) if v else logits.new_full((len(targets),), -torch.inf)": "logits.detach().amax(1)"},
    blind=True, alone=True)
of_mine = {"torch.logsumexp(shifted, 1)": "torch.logsumexp(padded, 1)", "shifted.gather": "padded.gather"}
answers.spoil(by_logsumexp, INFINITE, of_mine, blind=True, long=True)


@answers.wrong("logits are gathered", blind=True)
def gathers(logits, targets, first, group=None):
    n, width = dist.get_world_size(group), torch.tensor([logits.shape[1]])
    widths = [torch.empty_like(width) for _ in range(n)]
    dist.all_gather(widths, width, group=group)
    widths = [int(w) for w in widths]
    mine = F.pad(logits.detach(), (0, max(widths) - logits.shape[1])).contiguous()
    parts = [torch.empty_like(mine) for _ in range(n)]
    dist.all_gather(parts, mine, group=group)
    parts = [p[:, :w] for p, w in zip(parts, widths, strict=True)]
    parts[dist.get_rank(group)] = logits
    return F.cross_entropy(torch.cat(parts, 1), targets)


@answers.wrong("too many collectives", blind=True)
def token_by_token(logits, targets, first, group=None):
    losses = [in_two(logits[i : i + 1], targets[i : i + 1], first, group) for i in range(len(targets))]
    return torch.stack(losses).mean()


def of_each(x, group):
    of_all = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(of_all, x, group=group)
    return torch.stack(of_all)


spoil(MANY, {TOP: "of_each(padded.detach().amax(1), group).amax(0)[:, None]"}, long=True)


@answers.wrong(INFINITE, blind=True, long=True)
def end_inclusive(logits, targets, first, group=None):
    here = (targets >= first) & (targets <= first + logits.shape[1])
    column = (targets - first).where(here, logits.shape[1])
    logits = F.pad(logits, (0, 1), value=-torch.inf)
    shifted = logits - top(logits, group)[:, None]
    picked = shifted.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(torch.stack([shifted.exp().sum(1), picked]), group)
    return (total.log() - target).mean()


@answers.wrong(GRADIENT, blind=True, long=True)
def highest_attached(logits, targets, first, group=None):
    here, column, logits = target_column(logits, targets, first)
    mine = logits.amax(1)
    highest = mine.detach().clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    highest = torch.where(mine == highest, mine, highest)
    shifted = logits - highest[:, None]
    picked = shifted.gather(1, column[:, None])[:, 0].masked_fill(~here, 0)
    total, target = reduce(torch.stack([shifted.exp().sum(1), picked]), group)
    return (total.log() - target).mean()


def by_hand(mistake, changes, **options):
    answers.wrong(mistake, **options)(applied(exchanged(SplitLoss, changes, f"SplitLoss_{len(answers.answers)}")))


BACK, MINUS = "softmax, column = ctx.saved_tensors", "out[torch.arange(len(column)), column] -= 1"
by_hand("the gradient that comes in is left out", {"gradient / len": "1 / len"}, blind=True)
by_hand(TOKENS, {"gradient / len(column)": "gradient"}, blind=True, long=True)
by_hand(GRADIENT, {MINUS: ""}, blind=True)
equal = "summed(gradient, ctx.group) / dist.get_world_size(ctx.group)"
by_hand("something is sent where nothing is due", {BACK: f"{BACK}; gradient = {equal}"}, blind=True)
anywhere = "out[torch.arange(len(column)), column.clamp(max=max(0, out.shape[1] - 2))] -= 1"
by_hand(GRADIENT, {MINUS: anywhere}, long=True)
one_hot = "ctx.wide = F.one_hot(targets, max(int(targets.max()) + 1, first + logits.shape[1]))"
by_hand("kept for backward, but not needed there", {"ctx.group = group": one_hot})

# ---- not seen by others ----------------------------------------------------------------------------------

unseen = {
    SUM: "shifted.exp().sum(1)",
    TARGET: "picked",
    "return": "dist.all_reduce(total, group=group); dist.all_reduce(target, group=group); return",
}
spoil("a collective that autograd does not see", unseen, blind=False)
spoil("no gradient", {"target_column(logits,": "target_column(logits.detach(),"}, blind=False)
mine = "(logits.logsumexp(1) if logits.shape[1] else logits.sum(1)) - picked"
constant = {
    "return (total.log() - target).mean()": f"mine = {mine}; return ({END}).detach() + (mine - mine.detach()).mean()"
}
spoil(GRADIENT, constant, blind=False, long=True)
spoil(MANY, {TARGET: "reduce(torch.stack([picked] * 3), group)[0]"}, blind=False, long=True)
mine = "shifted.exp().sum(1)"
sums_gathered = f"of_each({mine}.detach(), group).sum(0) + {mine} - {mine}.detach()"
spoil(MANY, {SUM: sums_gathered}, blind=False, long=True)
spoil(INFINITE, {TOP: f"top(padded if {RANK} < 2 else padded.clamp(max=-1e5), group)[:, None]"}, blind=False)
spoil(INFINITE, {TOP: f"top(padded if {RANK} else padded.clamp(max=-1e5), group)[:, None]"}, blind=False, long=True)
of_own = "top(F.pad(logits, (0, 1), value=-torch.inf), group)[:, None]"
in_place = {"here, column, padded": f"logits.data -= {of_own}; here, column, padded", TOP: "0"}
spoil("what was given has changed", in_place, blind=False)
targets_moved = {"here, column": "targets -= first; first = 0; here, column"}
spoil("what was given has changed", targets_moved, blind=False, long=True)
wide = "F.one_hot(targets, first + logits.shape[1] + int(targets.max()) + 512)"
spoil("full copies are kept", {"return": f"wide = {wide}; return"}, blind=False)
spoil("the dtype changed", {"target_column(logits,": "target_column(logits.float(),"}, blind=False, long=True)
first_rank = f"mine = {LOW}; dist.broadcast(mine, group=group, group_src=0); shifted = padded - mine[:, None]"
spoil(MANY, {f"shifted = padded - {TOP}": first_rank}, blind=False, long=True)
owner = f"owner = summed(here.long() * {RANK}, group); return"
spoil(MANY, {"return": owner}, blind=False, long=True)
early = {"here, column, padded": "if not logits.shape[1]: return logits.sum()\n    here, column, padded"}
spoil(DIVIDE, early, blind=False, alone=True, long=True)
spoil(DIVIDE, {END: f"{END} + 0 * logits[:, 0].mean()"}, blind=False, alone=True, long=True)
spoil("not a tensor", {END: f"{END}.item()"}, blind=False)
spoil("rounded on the way", {"total.log()": "(total + 1e-7).log()"}, blind=False)
half = "border(lambda x, group: summed(x.bfloat16(), group).to(x.dtype), as_is)(shifted.exp().sum(1), group)"
spoil("rounded on the way", {SUM: half}, blind=False, long=True)
answers.spoil(without_padding, "the right loss with a gradient that is not finite",
    {"logits.detach().amax(1) if v": "logits.amax(1) if v"})
