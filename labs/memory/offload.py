"""Optimizer state on another tier: in host memory, for a model on a GPU, or on disk.

A step uses the optimizer's state once; during forward and backward nothing uses it.  So the state may live where there
is more room:

    where=      on that tier                        moved in a step, per parameter             like
    "cpu"       masters and state, in host memory   G to the host, P back: 2 + 2 bytes         ZeRO-Offload
    a folder    the same, in memory-mapped files    the files too, in and out: 12 + 12 bytes   ZeRO-Infinity

The bytes in the table are for a parameter in bfloat16 and AdamW; with parameters on the CPU, only the files are moved.
The update happens where the state is: moving the state to the GPU and back would send 12 + 12 bytes per parameter over
a narrow link.

    optimizer = Offloaded(model.parameters(), partial(torch.optim.AdamW, lr=1e-3), where="state")

`Offloaded` can be used wherever an optimizer can, as in `labs.zero`.  The master of a parameter is a copy of it, in
float32 at least, which the optimizer updates.  Parameters are updated one after the other.  While one parameter is
updated, a thread stores the state of the one before it, and fetches the state of the next one:

    thread      fetch 0   fetch 1    store 0  fetch 2    store 1  ...     store n
    caller                update 0   update 1            update 2 ...               commit

So at any moment a rank holds the state of three parameters, and not of all.  `labs.memory.disk` explains commits, and
why a crash at any moment loses one step at most.

Sources: Ren et al. 2021, "ZeRO-Offload", arXiv 2101.06840, section 3; Rajbhandari et al. 2021, "ZeRO-Infinity",
arXiv 2104.07857, section 5.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from labs.memory.disk import Disk
from labs.memory.mapped_files import Values
from labs.memory.precision import require_frozen, trained_and_frozen


class Offloaded:
    """An optimizer whose masters and state live on another tier than the parameters.

    params: the parameters to train; frozen ones are left as they are, and cost nothing
    optimizer: function that makes a torch optimizer of a list of masters; it must treat each parameter by itself, as
        all of `torch.optim` except LBFGS do
    where: "cpu", or a folder for this optimizer alone, to which every step writes the state; each rank writes its part

    If the folder has a training, that training is resumed: the parameters get their values after its last committed
    step, and `steps` is the number of that step.  Options such as the learning rate come from `optimizer`, not from the
    folder, and can be changed in `param_groups`.

    Raises ValueError for "cpu" if the parameters are on the CPU already, for a folder that has other parameters or was
    written by another number of ranks, and for files that were damaged (`labs.memory.disk`).  Raises RuntimeError after
    a failed step, which some parameters have taken and others have not, and for a parameter that was unfrozen.
    """

    def __init__(self, params: Iterable[nn.Parameter], optimizer: Callable[..., Any], where: str | Path):
        self.params, self.frozen = trained_and_frozen(params)
        self.optimizer, self.half_way = optimizer, False
        (options,) = optimizer([nn.Parameter(torch.empty(0))]).param_groups
        self.param_groups = [options | {"params": self.params}]
        if where == "cpu" and any(p.device.type == "cpu" for p in self.params):
            raise ValueError(
                'where="cpu": the parameters are on the CPU already; the next tier is a disk: give a folder'
            )
        self.tier = Host() if where == "cpu" else Disk(Path(where))
        if not len(self.tier):
            self.tier.commit(0, {i: self.tier.store(i, {"master": master_of(p)}) for i, p in enumerate(self.params)})
        require_as_many(self.params, len(self.tier), where)
        for i, p in enumerate(self.params):
            values = self.tier.read(i)
            require_master(i, p, values, where)
            p.detach().copy_(values["master"])

    @property
    def steps(self) -> int:
        """Return the number of steps that have been committed."""
        return self.tier.steps

    def step(self) -> None:
        """Update the parameters that have a gradient, and commit the new state to its tier."""
        self.require_whole()
        require_frozen(self.frozen)
        self.half_way = True
        due = [i for i, p in enumerate(self.params) if p.grad is not None]
        self.tier.commit(self.steps + 1, one_ahead(due, self.fetch, self.updated, self.store))
        self.half_way = False

    def fetch(self, i: int) -> tuple[Tensor, Values]:
        p = self.params[i]
        return to_host(p.grad, at_least_float32(p.dtype)), self.tier.fetch(i)

    def updated(self, i: int, fetched: tuple[Tensor, Values]) -> Values:
        """Let the optimizer take its step with parameter i alone, and return the parameter's new master and state."""
        gradient, values = fetched
        master = nn.Parameter(values["master"])
        master.grad = gradient
        inner = self.optimizer([master])
        inner.param_groups[0] |= {name: value for name, value in self.param_groups[0].items() if name != "params"}
        inner.state[master] = {name: value for name, value in values.items() if name != "master"}
        inner.step()
        return {"master": master.detach(), **inner.state[master]}

    def store(self, i: int, values: Values) -> Any:
        """Copy the master to parameter i, store its tensors on the tier, and return what the tier's `commit` needs."""
        self.params[i].detach().copy_(values["master"])
        return self.tier.store(i, values)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of torch's optimizers, with each parameter's master among its state.

        Tensors from a folder are mapped into memory: they use no memory until they are read.
        """
        self.require_whole()
        numbered = self.param_groups[0] | {"params": list(range(len(self.params)))}
        return {"state": {i: self.tier.read(i) for i in range(len(self.params))}, "param_groups": [numbered]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load masters, state and options, round the masters to the parameters, and commit as after a step.

        Raises ValueError if a master is missing, or has another shape or dtype.
        """
        state = state_dict["state"]
        require_as_many(self.params, len(state), "this state")
        for i, p in enumerate(self.params):
            require_master(i, p, state.get(i, {}), "this state")
        (options,) = state_dict["param_groups"]
        self.param_groups[0] |= {name: value for name, value in options.items() if name != "params"}
        copies = ({name: x.detach().to("cpu", copy=True) for name, x in state[i].items()} for i in range(len(state)))
        self.tier.commit(self.steps, {i: self.store(i, values) for i, values in enumerate(copies)})
        self.half_way = False

    def require_whole(self) -> None:
        if self.half_way:
            raise RuntimeError(
                "a step failed half way, so that some parameters have taken it and others have not: go back to an "
                "earlier state with load_state_dict(), or, from a folder, by making the optimizer anew"
            )


def one_ahead(
    due: Sequence[int], fetch: Callable[[int], Any], update: Callable[[int, Any], Any], store: Callable[[int, Any], Any]
) -> dict[int, Any]:
    """Fetch, update and store the values of each number in `due`; return `store`'s results by number.

    While parameter n is updated, a thread stores the values of n - 1 and fetches those of n + 1.  Raises the errors
    that `fetch` and `store` raise.
    """
    stored = {}
    with ThreadPoolExecutor(1) as thread:
        coming = [thread.submit(fetch, i) for i in due[:1]]
        for n, i in enumerate(due):
            values = coming[0].result()
            coming = [thread.submit(fetch, following) for following in due[n + 1 : n + 2]]
            stored[i] = thread.submit(store, i, update(i, values))
            del values  # now only the thread refers to them, until it has stored them
    return {i: future.result() for i, future in stored.items()}


def require_as_many(params: list[nn.Parameter], found: int, where: Any) -> None:
    if found != len(params):
        raise ValueError(f"{where} has {found} parameters, and {len(params)} were given: it belongs to another model")


def require_master(i: int, p: nn.Parameter, values: Values, where: Any) -> None:
    expected, found = described(p, at_least_float32(p.dtype)), "missing"
    if "master" in values:
        found = described(values["master"], values["master"].dtype)
    if found != expected:
        raise ValueError(f"{where}: the master of parameter {i}, {expected}, is {found} there")


def described(x: Tensor, dtype: torch.dtype) -> str:
    return f"of shape {tuple(x.shape)} in {str(dtype).removeprefix('torch.')}"


def master_of(p: nn.Parameter) -> Tensor:
    return to_host(p.detach(), at_least_float32(p.dtype))


def to_host(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a tensor to host memory, from a GPU to pinned memory, which its copy engines can access directly."""
    if x.device.type == "cpu":
        return x.to(dtype)
    with torch.cuda.device_of(x):  # a new thread starts with the first GPU as its device
        return torch.empty(x.shape, dtype=dtype, device="cpu", pin_memory=True).copy_(x)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# ---- tiers -----------------------------------------------------------------------------------------------


class Host:
    """A tier in this process's own memory, for parameters on a GPU.  The state is lost when the process ends."""

    def __init__(self) -> None:
        self.values: dict[int, Values] = {}
        self.steps = 0

    def __len__(self) -> int:
        return len(self.values)

    def read(self, i: int) -> Values:
        return self.values[i]

    fetch = read

    def store(self, i: int, values: Values) -> Values:
        return values

    def commit(self, steps: int, stored: dict[int, Values]) -> None:
        self.steps, self.values = steps, self.values | stored
