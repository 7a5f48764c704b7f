"""A model under DeepSpeed: an engine with the model, its optimizer and their communication.

    engine = initialize(model, {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}, make_optimizer)
    loss = engine(x, y)
    engine.backward(loss)
    engine.step()                       # this also frees the gradients
    full(engine)                        # {name: full parameter}, on every rank

On CPU no compiler is needed: the operator for shared memory that DeepSpeed would compile is switched off, and the
optimizer is PyTorch's.
"""

import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from shutil import which
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from labs.deepspeed.configuration import ACCUMULATION, MICRO, TRAIN, batch_sizes, require_known

OLDEST = (0, 19)
ADD = "`make learn EXTRA=deepspeed` adds it"
# PyTorch warns of deprecated names that DeepSpeed uses, and of a hook on a layer whose inputs are tokens.
NOT_THE_LEARNERS = r"`torch\.distributed\.\w+_tensor` is deprecated", "Full backward hook is firing"


def missing() -> str:
    """Return a sentence that says why DeepSpeed cannot be used here; "" if it can."""
    try:
        version = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return f"DeepSpeed is not installed: {ADD}"
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        least = ".".join(map(str, OLDEST))
        return f"DeepSpeed {version} is older than {least}: `make learn EXTRA=deepspeed` brings a newer one"
    return ""


def initialize(
    model: nn.Module, config: Mapping[str, Any], optimizer: Callable[[list[nn.Parameter]], Optimizer] | None = None
) -> Any:
    """Return the engine of a model, on all ranks of the job.

    config: a configuration, as DeepSpeed documents it
    optimizer: a function that makes one of PyTorch's optimizers of the trained parameters; without it, the
        configuration has to name an optimizer

    Raises ModuleNotFoundError if DeepSpeed is missing or too old; ValueError for keys that DeepSpeed does not know, and
    for batch sizes that contradict each other; RuntimeError if DeepSpeed's own optimizers, or its offload to NVMe,
    cannot be compiled here.
    """
    deepspeed = imported()
    config = checked(config)
    require_nvme(config)
    if optimizer is None:
        require_compiler(config)
    else:
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    made = optimizer([p for p in model.parameters() if p.requires_grad]) if optimizer else None
    return deepspeed.initialize(model=model, optimizer=made, config=config)[0]


def full(engine: Any) -> dict[str, Tensor]:
    """Gather the full parameters as {name: tensor}, the same on every rank; call this on all ranks."""
    gathered = imported().zero.GatheredParameters
    whole = {}
    for name, p in engine.module.named_parameters():
        with gathered([p], enabled=hasattr(p, "ds_id")):
            whole[name] = p.detach().clone()
    return whole


def imported() -> ModuleType:
    """Import DeepSpeed for PyTorch's default device, and connect it with the job's process group."""
    if reason := missing():
        raise ModuleNotFoundError(reason)
    choose_accelerator()
    with uncompiled():
        deepspeed = import_module("deepspeed")
        import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    for message in NOT_THE_LEARNERS:
        warnings.filterwarnings("ignore", message)
    if os.environ["DS_ACCELERATOR"] == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    return deepspeed


def choose_accelerator() -> None:
    """Make DeepSpeed, which looks for an accelerator during its import, use PyTorch's default device."""
    os.environ.setdefault("DS_ACCELERATOR", torch.get_default_device().type)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Switch off PyTorch's compiler during an import: Muon's file compiles a function, which takes 2 s on each rank."""
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCHDYNAMO_DISABLE"]
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before


def checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Check the keys of a configuration, and return the configuration with all three batch sizes."""
    zero = import_module("deepspeed.runtime.zero.config").DeepSpeedZeroConfig
    require_known(config)
    fields = {field.alias or name for name, field in zero.model_fields.items()} | {*zero.model_fields}
    require_known(config.get("zero_optimization", {}), fields, "zero_optimization in a configuration")
    sizes = batch_sizes(config, dist.get_world_size())
    return {"steps_per_print": 2**31, **config} | dict(zip((TRAIN, MICRO, ACCUMULATION), sizes, strict=True))


def require_nvme(config: Mapping[str, Any]) -> None:
    """Raise RuntimeError if the configuration offloads to NVMe and DeepSpeed's operator for it cannot be compiled.

    DeepSpeed compiles this operator at its first use, which takes minutes.
    """
    zero = config.get("zero_optimization", {})
    if any(zero.get(f"offload_{what}", {}).get("device") == "nvme" for what in ("param", "optimizer")):
        accelerator = import_module("deepspeed.accelerator").get_accelerator()
        if not accelerator.create_op_builder("AsyncIOBuilder").is_compatible(False):
            raise RuntimeError(
                "offload to NVMe takes DeepSpeed's async_io, which cannot be compiled here, for want of a C++ compiler "
                "or of libaio (on Debian and Ubuntu, libaio-dev): offload to the CPU, or see labs/memory/disk.py"
            )


def require_compiler(config: Mapping[str, Any]) -> None:
    """Raise RuntimeError if there is no compiler for DeepSpeed's own optimizers, which it compiles at first use."""
    from torch.utils.cpp_extension import get_cxx_compiler  # a late import, since it takes 0.2 s

    named = config.get("optimizer", {})
    if not named.get("params", {}).get("torch_adam") and not (which(get_cxx_compiler()) and which("ninja")):
        raise RuntimeError(
            f"DeepSpeed compiles its {named.get('type', 'optimizer')} when it is first used, and there is no C++ "
            "compiler or no ninja here: give `initialize` one of PyTorch's optimizers"
        )
