"""Training by `labs.fsdp` with a learner's own functions that gather full parameters and free them again."""

from collections.abc import Callable
from typing import Any

from labs.fsdp.parameter_group import ParameterGroup


def unshard_with(unshard: Callable[..., Any], reshard: Callable[..., Any]) -> None:
    """Make `labs.fsdp` gather and free parameters by these two functions from now on, in this process.

    unshard(shards, fulls): a function that gathers parameters; `check.unshard_and_reshard` describes its arguments.
        `unshard` waits for its collectives, so no layer is prefetched.
    reshard(fulls): a function that frees the gathered parameters.
    """

    def arrive(group: ParameterGroup) -> None:
        if group.parameters and not group.gathered:
            unshard([p.local for p in group.parameters], fulls_of(group))
            for p in group.parameters:
                p.versions.allow()
            group.gathered, group.taken = True, group.shard_versions()

    def drop(group: ParameterGroup) -> None:
        if group.gathered:
            for p in group.parameters:
                p.hide()
                p.versions.forbid()
            reshard(fulls_of(group))
            group.gathered = False

    ParameterGroup.gather = lambda group: None
    ParameterGroup.arrive, ParameterGroup.drop = arrive, drop


def fulls_of(group: ParameterGroup) -> list[Any]:
    return [p.full.data for p in group.parameters]
