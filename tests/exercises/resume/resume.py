"""Answers to resume (08b): what a training remembers, and how another one goes on from it."""

import copy
import io
import random  # noqa: F401 (varied answers use it)

import torch
import torch.distributed as dist

from tests.answers import Exercise

# fmt: off
answers = Exercise("resume")
LINE = "the same training, to the last bit; each rank remembers {} × the bytes that it needs"


def remember(model, optimizer, schedule, loader):
    moments = {}
    for name, p in model.named_parameters():
        moments[name] = {key: x.clone() for key, x in optimizer.state[p].items()}
    return {
        "parameters": {name: p.detach().clone() for name, p in model.named_parameters()},
        "buffers": {name: x.clone() for name, x in model.named_buffers()},
        "moments": moments,
        "rate": optimizer.param_groups[0]["lr"],
        "steps": schedule.last_epoch,
        "read": loader.step,
        "random": torch.get_rng_state(),
    }


def resume(state, model, optimizer, schedule, loader):
    for name, p in model.named_parameters():
        p.data.copy_(state["parameters"][name])
        optimizer.state[p] = state["moments"][name]
    for name, x in model.named_buffers():
        x.copy_(state["buffers"][name])
    optimizer.param_groups[0]["lr"] = state["rate"]
    schedule.last_epoch = state["steps"]
    loader.step = state["read"]
    torch.set_rng_state(state["random"])


def remembers(fn):
    """Return the two functions of an answer that remembers by `fn`."""
    return fn, resume


def resumes(fn):
    """Return the two functions of an answer that resumes by `fn`."""
    return remember, fn


# ---- right -----------------------------------------------------------------------------------------------

answers.right(remember, line=LINE.format("1.00"), given=remembers)


def resume_from_bytes(state, model, optimizer, schedule, loader):
    kept = torch.load(io.BytesIO(state["bytes"]), weights_only=True)
    model.load_state_dict(kept["model"])
    numbers = {name: number for number, name in enumerate(kept["names"])}
    state_of = kept["optimizer"]["state"]
    names = {p: name for name, p in model.named_parameters()}
    mine = [numbers[names[p]] for p in optimizer.param_groups[0]["params"]]
    optimizer.load_state_dict(
        {
            "state": {i: state_of[number] for i, number in enumerate(mine) if number in state_of},
            "param_groups": kept["optimizer"]["param_groups"],
        }
    )
    schedule.load_state_dict(kept["schedule"])
    loader.step = kept["loader"]
    torch.set_rng_state(kept["random"])


@answers.right(given=lambda fn: (fn, resume_from_bytes))
def remember_in_bytes(model, optimizer, schedule, loader):
    file = io.BytesIO()
    live = {
        "model": model.state_dict(),
        "names": [name for p in optimizer.param_groups[0]["params"] for name, q in model.named_parameters() if p is q],
        "optimizer": optimizer.state_dict(),
        "schedule": {key: x for key, x in schedule.state_dict().items() if isinstance(x, int | list)},
        "loader": loader.step,
        "random": torch.get_rng_state(),
    }
    torch.save(live, file)
    return {"bytes": file.getvalue()}


# ---- wrong: what is remembered ---------------------------------------------------------------------------

P = "p.detach().clone()"
NOW, BEGIN = "torch.get_rng_state()", "    moments = {}\n"
LIVE, OTHER = "what was remembered is not a copy", "a moment that belongs to another parameter"
RANDOM, EXCHANGED = "one random state for all ranks", "ranks exchange what they remember"


def of_rank_0(state):
    dist.broadcast(state, 0)
    return state


kept = answers.slips(remember, given=remembers)


def first(mistake, words, **options):
    """Note a wrong answer that does `words` before it remembers anything."""
    kept(mistake, {BEGIN: f"    {words}\n{BEGIN}"}, **options)


kept("nothing is remembered", {"    return {": "    state = {"})
kept("not a dictionary",
    {"    return {": "    return list({",
     "get_rng_state(),\n    }": "get_rng_state(),\n    }.items())"})
kept(LIVE, {P: "p.detach()"})
kept("right only for the first restart", {"loader.step": "schedule._step_count - 1"})
kept(RANDOM, {NOW: "of_rank_0(torch.get_rng_state())"}, alone=True)
kept("the random numbers begin anew", {NOW: "torch.Generator().manual_seed(torch.initial_seed()).get_state()"})
first("remembering moves the random numbers", "torch.manual_seed(0)")
first("remembering changes the training", "model.eval()")
kept("what is remembered cannot be saved", {P: "(x for x in p.detach().clone())"})


@answers.wrong("what another rank remembers", alone=True, given=remembers)
def remember_rank_0(*training):
    states = [remember(*training)]
    dist.broadcast_object_list(states, 0)
    return states[0]


@answers.wrong(EXCHANGED, given=remembers)
def remember_all(*training):
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, remember(*training))
    return states[dist.get_rank()]


def resume_the_model(state, model, optimizer, schedule, loader):
    model.load_state_dict(state["model"])
    loader.step = state["step"]


@answers.wrong("the optimizer is left out", given=lambda fn: (fn, resume_the_model))
def remember_the_model(model, optimizer, schedule, loader):
    return {"model": copy.deepcopy(model.state_dict()), "step": loader.step}


def as_in_most_scripts(model, optimizer, schedule, loader):
    """torch.save of everybody's state_dict."""
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    kept = {name: copy.deepcopy(part.state_dict()) for name, part in parts.items()}
    return kept | {"step": loader.step, "random": torch.get_rng_state()}


def resume_most(state, model, optimizer, schedule, loader):
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    loader.step = state["step"]
    torch.set_rng_state(state["random"])


answers.wrong(OTHER, given=lambda fn: (fn, resume_most))(as_in_most_scripts)

# ---- wrong: how it goes on -------------------------------------------------------------------------------


LOAD = 'p.data.copy_(state["parameters"][name])'
BUFFER = 'x.copy_(state["buffers"][name])'
SCHEDULE, PLACE = 'schedule.last_epoch = state["steps"]', 'loader.step = state["read"]'
SET = 'torch.set_rng_state(state["random"])'

spoil = answers.slips(resume, given=resumes)
spoil("buffers are left out", {BUFFER: "pass"})
spoil("the schedule is left out", {SCHEDULE: "pass"})
spoil("the data begin anew", {PLACE: "pass"})
spoil("the random state is left out", {SET: ""})
answers.spoil(remember, "right only after a first step",
    {"x.clone() for key, x in optimizer.state[p].items()":
     'optimizer.state[p][key].clone() for key in ("step", "exp_avg", "exp_avg_sq")'},
    given=remembers)
spoil("nothing is resumed", {"    for name, p in": "    return\n    for name, p in"})
PARTED = "the optimizer has other parameters than the model"
spoil(PARTED,
    {LOAD: "pass",
     "    for name, x in": '    model.load_state_dict(state["parameters"] | state["buffers"], assign=True)\n'
         "    for name, x in"})
