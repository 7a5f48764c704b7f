"""A model's weights under Hugging Face's names: this rank's part of them, in any layout, loaded from a folder.

load_pretrained   reads the blocks that this rank holds, and nothing else
named             returns this rank's parameters under their names in a Llama

labs.checkpoint.exporting writes a folder in the same format.
"""

from collections.abc import Collection, Iterable
from itertools import chain
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from labs.agree import on_all_ranks
from labs.checkpoint.loading import read
from labs.checkpoint.parts import Held, Parts
from labs.llama.config_json import read_config, require_same
from labs.llama.weights import DTYPES, names, opened, require_whole, whole_shapes
from labs.model import Config


def load_pretrained(folder: str | Path, held: Held, config: Config, group: ProcessGroup | None = None) -> None:
    """Load this rank's part of a folder's weights, of any dtype; the optimizer starts with empty state.

    config: the whole model's configuration

    Raises ValueError, on all ranks and before any tensor changes, if the folder holds another model, or only a part of
    this model.
    """
    folder = Path(folder).expanduser()

    def look() -> set[str]:
        require_same(config, read_config(folder), folder)
        with opened(folder) as files:
            require_whole(config, files, folder)
        return {*named(held, config)}

    require_all(config, on_all_ranks(look, group))
    with opened(folder) as files, torch.no_grad():
        for name, part in named(held, config).items():
            for block, x in part.blocks.items():
                x.copy_(read(files[name], name, block.slices))
    held.loaded(held.room({}), {})


def named(held: Held, config: Config) -> Parts:
    """Return this rank's parameters under their names in a Llama.  Raises ValueError for another model's config."""
    theirs, shapes = names(config), whole_shapes(config)
    ours = {key.removeprefix("model/"): part for key, part in held.parts({}).items() if key.startswith("model/")}
    if config.tied:
        shapes["head.weight"] = shapes["embed.weight"]
    for name, part in ours.items():
        if name not in theirs:
            raise ValueError(
                f"a Llama of this config has no {name!r}: give the whole model's config, or a model without that tensor"
            )
        if part.shape != shapes[name] or part.dtype not in DTYPES:
            raise ValueError(
                f"{name!r} is {part.dtype} of shape {part.shape}: by the config it is {tuple(shapes[name])}, in one of "
                f"{', '.join(map(str, DTYPES))}"
            )
    require_tied_or_not(ours, config)
    return {theirs[name]: part for name, part in ours.items()}


def require_tied_or_not(ours: Parts, config: Config) -> None:
    """Raise ValueError if this rank holds embedding and head, and ties them otherwise than the config."""
    ends = [ours[name].blocks.values() for name in ("embed.weight", "head.weight") if name in ours]
    places = [[x.data_ptr() for x in blocks] for blocks in ends]
    if len(places) == 2 and all(places) and (places[0] == places[1]) != config.tied:
        raise ValueError(
            f"the config has tied={config.tied}, but the model has tied={not config.tied}: give the model's own config"
        )


def require_all(config: Config, everyones: Iterable[Collection[str]]) -> None:
    """Raise ValueError if a tensor of the config's model is on no rank."""
    found = {*chain(*everyones)}
    if missing := [name for name in names(config).values() if name not in found]:
        raise ValueError(f"{missing[0]} is on no rank: call this on all ranks, each with its whole part of the model")
