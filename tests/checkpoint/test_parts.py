"""Tests of labs.checkpoint.parts: unusual models are saved from one layout and loaded into another, or refused."""

import contextlib
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

from labs import dtensor
from labs.checkpoint import Held, HeldByZero, load, newest, save
from labs.kit.launch import run
from labs.mesh import Mesh
from labs.model import GPT
from labs.zero import Zero
from tests.checkpoint.common import ADAMW, CONFIG, LAYOUTS, alone, in_vectors, linear, numbers, same, words_of
from tests.models import Awkward, batch

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def with_buffers(seed, **buffers):
    model = linear(seed)
    for name, x in buffers.items():
        model.register_buffer(name, x)
    return model


def of_dtype(dtype, seed):
    torch.manual_seed(seed)
    bits = torch.randint(2 if dtype == torch.bool else 100, (4, 6 * dtype.itemsize), dtype=torch.uint8)
    x = bits.view(dtype)
    return with_buffers(seed, x=x, zero=x[0, 0].clone(), empty=x[:0], cut=x[1:3, 2:5], turned=x.T)


def views(seed):
    x, z = torch.rand(2, 3), torch.rand(3, dtype=torch.complex64)
    return with_buffers(seed, x=x, rows=x[1:], again=x, other=x.T, conjugate=z.conj(), imaginary=z.imag)


def hidden(seed):
    model = linear(seed)
    model.register_buffer("scratch", torch.full((2,), float(seed)), persistent=False)
    return model


def nested(seed):
    torch.manual_seed(seed)
    model = nn.ModuleDict({"a/b": nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "none": nn.Identity()})
    nn.utils.parametrizations.weight_norm(model["a/b"][0])
    model["again"] = model["a/b"]
    return model


class Scaled(nn.Linear):
    """A layer with three scales that `state_dict()` makes anew each time, in the three ways that PyTorch has."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__(3, 3)
        self.extra, self.own, self.hooked = seed + 0.25, seed + 0.5, seed + 0.75
        self.register_state_dict_post_hook(Scaled.add)
        self.register_load_state_dict_pre_hook(Scaled.take)

    def get_extra_state(self):
        return torch.tensor(self.extra)

    def set_extra_state(self, value):
        self.extra = float(value)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}own"] = torch.full((2,), self.own)

    def _load_from_state_dict(self, state, prefix, *others):
        if (own := state.pop(f"{prefix}own", None)) is not None:
            self.own = float(own[0])
        super()._load_from_state_dict(state, prefix, *others)

    def add(self, state, prefix, metadata):
        state[f"{prefix}hooked"] = torch.tensor([self.hooked])

    def take(self, state, prefix, *others):
        if (hooked := state.pop(f"{prefix}hooked", None)) is not None:
            self.hooked = float(hooked)


ODD = {
    "scaled": lambda seed: nn.Sequential(Scaled(seed), nn.Linear(3, 3)),
    **{str(dtype): partial(of_dtype, dtype) for dtype in DTYPES},
    "views of one another": views,
    "not in its state_dict()": hidden,
    "nested": nested,
    "awkward": lambda seed: Awkward(seed=seed),
    "no tensors": lambda seed: nn.Identity(),
}


def test_odd_models_by_way_of_zero(tmp_path):
    def body():
        wrong = []
        for name, make in ODD.items():
            hold = (lambda model: alone(model)[0]) if name != "no tensors" else Held
            held, again, others = hold(make(1)), hold(make(3)), [hold(make(2))]
            if name != "no tensors":
                others += [in_vectors(stage, make(2))[0] for stage in (1, 3)]
            save(tmp_path / name, 1, held)
            for step, other in enumerate(others, start=2):
                load(tmp_path / name / "step-1", other)
                load(save(tmp_path / name, step, other), again)
                wrong += [] if same(numbers(again), numbers(held)) else [(name, step)]
        return wrong

    for wrong in run(body, ranks=2):
        assert not wrong


# ---- tensors with several names, and tensors that were replaced ------------------------------------------


def test_what_is_tied_is_stored_once_and_a_pipelines_two_ends_must_be_equal_where_they_are_one(tmp_path):
    tied, untied = (partial(GPT, replace(CONFIG, tied=tied)) for tied in (True, False))

    def body():
        _, in_stages = LAYOUTS["pp"]
        save(tmp_path, 1, in_vectors(1, tied())[0])
        save(tmp_path, 2, in_stages(untied())[0])
        load(tmp_path / "step-1", Held(apart := untied()))
        said = words_of(lambda: load(tmp_path / "step-2", Held(tied())))
        return torch.equal(apart.head.weight, apart.embed.weight), said

    for equal, said in run(body, ranks=3):
        assert equal and "another model: 'model/embed.weight' and 'model/head.weight' are one tensor here, and" in said
    once = json.loads((tmp_path / "step-1" / "index.json").read_text())["record"]["tensors"]["model/head.weight"]
    assert once["key"] == "model/embed.weight"


def test_a_buffer_that_was_replaced_is_saved_as_it_is_now(tmp_path):
    def body():
        held = Held(model := with_buffers(1, seen=torch.zeros(2)))
        model.seen = model.seen + 1
        save(tmp_path, 1, held)
        model.seen = torch.zeros(2)
        load(newest(tmp_path), held)
        return model.seen.tolist()

    assert run(body, ranks=2) == [[1.0, 1.0]] * 2


def test_what_state_dict_makes_anew_is_restored_or_refused(tmp_path):
    """Check one layout here; test_odd_models_by_way_of_zero checks every one."""

    def body():
        save(tmp_path, 1, Held(Scaled(seed=1)))
        load(newest(tmp_path), Held(fresh := Scaled(seed=7)))
        other = linear()
        other.register_state_dict_post_hook(lambda module, state, *_: state.update(count=torch.ones(1)))
        save(tmp_path, 2, Held(other))
        return fresh.extra, fresh.own, fresh.hooked, words_of(lambda: load(newest(tmp_path), Held(other)))

    for *scales, said in run(body, ranks=2):
        assert scales == [1.25, 1.5, 1.75]
        assert said.startswith("'count' is made by state_dict(), and load_state_dict() does not know it")


def test_two_buffers_in_the_same_memory_must_be_equal_in_a_checkpoint(tmp_path):
    def body():
        x = torch.zeros(2)
        save(tmp_path, 1, Held(with_buffers(1, a=torch.ones(2), b=torch.zeros(2))))
        save(tmp_path, 2, Held(with_buffers(1, a=torch.ones(2), b=torch.ones(2))))
        load(tmp_path / "step-2", held := Held(with_buffers(1, a=x, b=x[:])))
        return x.tolist(), words_of(lambda: load(tmp_path / "step-1", held))

    numbers, said = run(body, ranks=1)[0]
    assert numbers == [1, 1] and "'model/a' and 'model/b' are one tensor here, and differ" in said


def test_a_parameter_frozen_or_unfrozen_since_begins_anew_or_is_refused(tmp_path):
    def body():
        thawed, frozen = linear(2).bfloat16(), linear(1).bfloat16()
        frozen.bias.requires_grad_(False)
        for step, model in enumerate((frozen, thawed)):
            held, model, optimizer = alone(model)
            model(torch.ones(1, 3).bfloat16()).sum().backward()
            optimizer.step()
            save(tmp_path, step, held)
        load(tmp_path / "step-0", held)
        begun_anew = torch.equal(optimizer.masters[1], thawed.bias.float())
        said = words_of(lambda: load(tmp_path / "step-1", alone(frozen)[0]))
        return len(optimizer.inner.state), begun_anew, said

    for entries, begun_anew, said in run(body, ranks=2):
        assert entries == 1 and begun_anew and "is of another training: no optimizer has its 'bias'" in said


def test_a_counter_of_a_parameter_without_dims_stays_one_number(tmp_path):
    def body():
        held, model, zero = in_vectors(1, Awkward())
        model(batch(0, 0)).backward()
        zero.step()
        load(save(tmp_path, 1, held), held)
        return [tuple(kept["step"].shape) for kept in zero.optimizer.state.values()]

    for shapes in run(body, ranks=2):
        assert set(shapes) == {()}


def test_what_is_loaded_after_a_broken_backward_is_what_is_computed_with(tmp_path):
    def body():
        held, model, _ = in_vectors(3, Awkward())
        save(tmp_path, 1, in_vectors(3, Awkward(seed=1))[0])
        broken = model.layers[1][2].register_full_backward_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            model(batch(0, 0)).backward()
        broken.remove()
        load(newest(tmp_path), held)
        return model(batch(0, 0)).item() == Awkward(seed=1)(batch(0, 0)).item()

    assert run(body, ranks=2) == [True, True]


# ---- stages ----------------------------------------------------------------------------------------------


def test_a_stage_may_have_no_parameters_and_so_no_optimizer(tmp_path):
    def body():
        held, *_ = alone(linear()) if dist.get_rank() == 0 else (Held(nn.Tanh()),)
        save(tmp_path, 1, held)
        load(newest(tmp_path), held)

    run(body, ranks=2)


# ---- refusals --------------------------------------------------------------------------------------------


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"seen": 3}

    def set_extra_state(self, state):
        pass


def of_summands():
    return with_buffers(1, x=dtensor.DTensor.from_local(torch.ones(2), Mesh((2,), ("dp",)), [dtensor.Partial()]))


def of_torchs_summands():
    return with_buffers(1, x=DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()]))


REFUSED = [
    (lambda: Extra(3, 3), "'_extra_state' is no tensor: give what is in it to save(values=)"),
    (lambda: with_buffers(1, x=torch.eye(3).to_sparse()), "'x' is torch.sparse_coo: a checkpoint has dense tensors"),
    (of_summands, "'x' has a summand on each rank: redistribute() it"),
    (of_torchs_summands, "'x' has a summand on each rank: redistribute() it"),
    (lambda: nn.LazyLinear(3), "'weight' is lazy: run a forward before, so that it has a shape"),
    *(
        (lambda dtype=dtype: with_buffers(1, x=torch.ones(16, dtype=torch.uint8).view(dtype)), f"'x' is {dtype}, which")
        for dtype in (torch.complex128, torch.bits8, torch.float4_e2m1fn_x2)
    ),
    (lambda: with_buffers(1, x=torch.ones(3, 1).expand(3, 2)), "'x' is expanded, so that it cannot be written to"),
    (lambda: with_buffers(1, x=torch.ones(3, device="meta")), "'x' is on the meta device: give it numbers before"),
]


def test_a_checkpoint_refuses_what_it_cannot_hold():
    def body():
        torch.manual_seed(1)
        return [[words_of(lambda: hold(make())) for hold in holds] for make, _ in REFUSED]  # noqa: B023

    holds = Held, lambda model: HeldByZero(Zero(model, 1, ADAMW))

    for said in run(body, ranks=2):
        for both, (_, sentence) in zip(said, REFUSED, strict=True):
            assert all(sentence in (words or "") for words in both), (both, sentence)


def test_a_model_in_zero_is_held_by_zero_alone():
    def body():
        said = []
        for stage in (1, 2, 3):
            zero = Zero(linear(), stage, ADAMW)
            for optimizer in (None, zero.optimizer):
                said.append(words_of(lambda: Held(zero.model, optimizer=optimizer)))  # noqa: B023
        return said

    for said in run(body, ranks=2):
        assert said == ["'flat0' is a vector of a model that is in Zero: give HeldByZero(zero)"] * 6


def test_a_parameter_that_came_later_is_reported(tmp_path):
    def body():
        held, _, optimizer = alone(linear())
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        return [words_of(lambda: save(tmp_path, 1, held)), words_of(lambda: held.room({}))]

    for said in run(body, ranks=2):
        assert said == ["the optimizer has a parameter of shape (2,) that is in no model given"] * 2


def test_two_stages_with_one_name_are_reported():
    with pytest.raises(
        ValueError, match="two of the models have a 'weight': put them into one module, under two names"
    ):
        Held(nn.BatchNorm1d(3), linear())
