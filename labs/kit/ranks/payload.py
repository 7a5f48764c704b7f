"""Serialization of the function that a caller sends to its ranks, and of the values that the ranks send back.

    pickled(fn, args, kwargs)    in the caller: pickle the function by value, even one from a notebook's cell
    pack(value, file)            in a rank: write the value and its tensors into a file without a name
    unpack(file, sizes)          in the caller: read the value.  A class that the caller sent comes back as the caller's
                                 own class, with its present methods and attributes.

A tensor is sent as its bytes, and a view of a tensor as the view's bytes only: torch would send the whole storage, and
copy it several times.
"""

from __future__ import annotations

import builtins
import contextlib
import copyreg
import functools
import importlib
import io
import linecache
import os
import pickle
import sys
import tempfile
import types
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import IO, Any

import cloudpickle
import torch
from cloudpickle import cloudpickle as cloudpickle_parts

from labs.kit.watch import stack_frames


def pickled(fn: Callable[..., Any], args: Any, kwargs: Any) -> bytes:
    """Return (fn, args, kwargs) as bytes.

    Raises TypeError, which names the variable or argument that cannot be sent to the ranks.
    """
    if autocall := sys.modules.get("IPython.core.autocall"):  # a notebook's exit() holds the kernel: send Python's
        for kind in (autocall.ExitAutocall, *autocall.ExitAutocall.__subclasses__()):
            copyreg.pickle(kind, lambda _: (getattr, (builtins, "exit")))
    try:
        return dumps((fn, args, kwargs))
    except NotebooksOwn as error:
        raise TypeError(str(error)) from None
    except Exception as error:  # a class may refuse to be pickled with any exception
        what = culprit(fn, args, kwargs)
        raise TypeError(f"{what} cannot be sent to the ranks ({error}): make it inside the function") from error


class NotebooksOwn(TypeError):
    """The error of a function for ranks that contains an IPython magic or a !command."""


class Pickler(cloudpickle.Pickler):
    """A pickler by value, like cloudpickle's, with three exceptions.

    Every module is pickled by name, even a module of a class of its own, such as torch's `config` modules: cloudpickle
    would pickle the content of these with any function that uses both `torch.distributed` and a variable named
    `config`.  Tensors are passed as buffers.  A function with a cache (functools.lru_cache) is sent with an empty
    cache.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and sys.modules.get(obj.__name__) is obj:
            return importlib.import_module, (obj.__name__,)
        if type(obj) is torch.Tensor and is_plain(obj):
            data = obj.detach()
            if data.untyped_storage().nbytes() > data.nbytes:
                data = data.clone()
            content = torch.empty(0, dtype=torch.uint8).set_(data.untyped_storage())
            layout = data.storage_offset(), data.shape, data.stride()
            return tensor_of, (pickle.PickleBuffer(content.numpy()), obj.dtype, layout, obj.requires_grad)
        if isinstance(obj, functools._lru_cache_wrapper) and (obj.__module__ == "__main__" or "<" in obj.__qualname__):
            return cached, (obj.__wrapped__, obj.cache_parameters())
        if getattr(type(obj), "__module__", "").startswith("ipykernel.") and hasattr(obj, "run_cell_magic"):
            raise NotebooksOwn(
                "a function for ranks has a %magic, or a !command, which only the notebook can run: take it out, or "
                "use subprocess.run(command, shell=True)"
            )
        return super().reducer_override(obj)


def cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    return functools.lru_cache(**parameters)(fn)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is only bytes with a dtype and a shape; torch pickles every other tensor."""
    special = tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.__dict__
    has_bytes = tensor.layout == torch.strided and tensor.device.type == "cpu"
    return bool(has_bytes and not special and tensor.untyped_storage().nbytes() >= tensor.nbytes)


def tensor_of(content: Any, dtype: torch.dtype, layout: tuple[Any, ...], requires_grad: bool) -> torch.Tensor:
    known = torch.frombuffer(content, dtype=torch.uint8) if len(content) else torch.empty(0, dtype=torch.uint8)
    storage = known.clone().untyped_storage()  # a clone can be resized
    return torch.empty(0, dtype=dtype).set_(storage, *layout).requires_grad_(requires_grad)


def dumps(value: Any, buffers: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Return `value` as bytes, and append its large parts to `buffers` if a list is given."""
    file = io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=None if buffers is None else buffers.append).dump(value)
    return file.getvalue()


def pack(value: Any, file: int) -> list[int]:
    """Write `value` into a file; return the bytes of its pickle and of each of its buffers, which `unpack` needs."""
    buffers: list[pickle.PickleBuffer] = []
    parts = [memoryview(dumps(value, buffers)), *(buffer.raw() for buffer in buffers)]
    with open(file, "wb", closefd=False) as out:
        for part in parts:
            out.write(part)
    return [part.nbytes for part in parts]


def unpack(file: int, sizes: list[int]) -> Any:
    with open(file, "rb", closefd=False) as source:
        source.seek(0)
        stream, *buffers = [read(source, size) for size in sizes]
    return Unpickler(io.BytesIO(stream), buffers=buffers).load()


class Unpickler(pickle.Unpickler):
    """An unpickler that does not change the classes of this process, even if a rank sends one of these classes back.

    cloudpickle finds a class that was sent before by a number, and would set the state of this class again: its methods
    would use the rank's copies of the notebook's variables, and its attributes would be those of the rank.
    """

    def __init__(self, file: IO[bytes], **options: Any) -> None:
        super().__init__(file, **options)
        self.known = weakref.WeakSet(cloudpickle_parts._DYNAMIC_CLASS_TRACKER_BY_CLASS)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return self.set_state if found is cloudpickle_parts._class_setstate else found

    def set_state(self, kind: type, state: Any) -> type:
        return kind if kind in self.known else cloudpickle_parts._class_setstate(kind, state)


def read(source: IO[bytes], size: int) -> memoryview:
    content = memoryview(torch.empty(size, dtype=torch.uint8).numpy())  # a bytearray would first be zeroed
    if source.readinto(content) != size:  # type: ignore[attr-defined]
        raise ValueError("the file with the rank's value is cut off")
    return content


def shared_file(stack: contextlib.ExitStack, size: int = 0) -> int:
    """Return the descriptor of a file without a name, which a rank and its caller share until both have closed it.

    On Linux, the file is in memory.  Elsewhere, the file is on disk, and is filled with zeros at once: if the disk had
    no room for a mapped file later, the rank would end without a message.
    """
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("labs")
        os.truncate(file, size)
    else:
        file, path = tempfile.mkstemp()
        os.unlink(path)
        os.pwrite(file, bytes(size), 0)
    stack.callback(os.close, file)
    return file


def culprit(fn: Callable[..., Any], args: Any, kwargs: Any) -> str:
    """Return the name of the first argument or variable of the function that cannot be pickled."""
    used = {f"argument {i + 1}": value for i, value in enumerate(args)} | {
        f"argument {k!r}": v for k, v in kwargs.items()
    }
    code = getattr(fn, "__code__", None)
    if code is not None:
        cells = dict(zip(code.co_freevars, fn.__closure__ or (), strict=False))
        used |= {f"variable {k!r}": cell.cell_contents for k, cell in cells.items() if cell != types.CellType()}
        used |= {f"variable {k!r}": fn.__globals__[k] for k in code.co_names if k in fn.__globals__}
    for label, value in used.items():
        try:
            dumps(value)
        except Exception:  # any exception shows that this is the value that cannot be pickled
            return f"{label} ({type(value).__name__}) of {getattr(fn, '__name__', 'the function')}"
    return f"{getattr(fn, '__name__', fn)!s}"


def cell_sources() -> dict[str, str]:
    """Return the text of the notebook's cells as {file: text}, so that a rank's traceback can show a cell's lines."""
    return {
        file: "".join(entry[2])
        for file, entry in linecache.cache.items()
        if len(entry) > 2 and stack_frames.CELL.match(file)
    }
