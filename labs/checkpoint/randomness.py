"""The state of a rank's random number generators, from which a training can be resumed.

    generator                                 name in a state
    torch's on the CPU                        "cpu"       always
    torch's on this rank's GPU                "cuda"      if the rank has used a GPU
    Python's `random`                         "python"    always
    numpy's `numpy.random`                    "numpy"     if it has been imported

Each rank has its own state, and gives it to `save` as `own=`: with one state for all ranks, dropout would drop the same
elements on every rank.  Generators that a program makes itself, as `labs.data.Batches` does, are not part of the state.
"""

import importlib
import random
import sys
from base64 import b64decode, b64encode
from typing import Any

import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """Return the state of this rank's generators, made of what JSON can hold."""
    version, numbers, gauss = random.getstate()
    state = {"cpu": text(torch.get_rng_state()), "python": [version, [*numbers], gauss]}
    if torch.cuda.is_initialized():
        state["cuda"] = text(torch.cuda.get_rng_state())
    if numpy := sys.modules.get("numpy.random"):
        name, numbers, *rest = numpy.get_state()
        state["numpy"] = [name, numbers.tolist(), *rest]
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set this rank's generators to a state that `random_state` returned.

    Raises ValueError, before any generator changes, if `state` is another value, or has a GPU's state without a GPU.
    """
    try:  # each state is first tried on a new generator
        cpu, (version, numbers, gauss) = tensor(state["cpu"]), state["python"]
        torch.Generator("cpu").set_state(cpu)
        python = version, tuple(numbers), gauss
        random.Random().setstate(python)
        if "cuda" in state:
            if not torch.cuda.is_available():
                raise ValueError("it has a GPU's state, but there is no GPU")
            cuda = tensor(state["cuda"])
            torch.Generator("cuda").set_state(cuda)
        if "numpy" in state:
            numpy = importlib.import_module("numpy.random")
            numpy.RandomState().set_state(state["numpy"])
    except (ImportError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"the state cannot be set here ({error}): give one that random_state() returned") from error
    torch.set_rng_state(cpu)
    random.setstate(python)
    if "cuda" in state:
        torch.cuda.set_rng_state(cuda)
    if "numpy" in state:
        numpy.set_state(state["numpy"])


def text(state: Tensor) -> str:
    return b64encode(bytes(state.tolist())).decode()


def tensor(text: str) -> Tensor:
    return torch.tensor(list(b64decode(text)), dtype=torch.uint8, device="cpu")
