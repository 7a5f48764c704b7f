"""Exercises in the places of what the course wrote: do they carry a whole training?"""

from collections.abc import Callable
from typing import Any

from labs.parameter_group import ParameterGroup


def unshard_with(unshard: Callable[..., Any], reshard: Callable[..., Any]) -> None:
    """From here on, in this process, `labs.fsdp` gathers and drops by these two.

    unshard(shards, fulls), reshard(fulls): as `check.unshard_and_reshard` has them.  `unshard` waits, so nothing is
    gathered ahead.
    """

    def arrive(group: ParameterGroup) -> None:
        if group.parameters and not group.gathered:
            unshard([p.local for p in group.parameters], fulls_of(group))
            for p in group.parameters:
                p.versions.allow()
            group.gathered, group.taken = True, group.versions()

    def drop(group: ParameterGroup) -> None:
        if group.gathered:
            for p in group.parameters:
                p.hide()
            reshard(fulls_of(group))
            group.gathered = False

    ParameterGroup.gather = lambda group, smaller=None: None
    ParameterGroup.arrive, ParameterGroup.drop = arrive, drop


def fulls_of(group: ParameterGroup) -> list[Any]:
    return [p.full.data for p in group.parameters]
