"""A plan for a run: how should this model be trained on these machines?  Every layout that fits, the fastest first.

    machines         a cluster in numbers: GPUs, memory, operations, links
    constants        the fraction of those numbers that a training program reaches, which no data sheet says
    layout           a layout: the part of the model, of its state and of the batch that each rank has
    candidates       all layouts, and those that cannot be run
    sparse           models with experts: their shapes, and what of them a token uses
    layer_split      a model's layers, split among the ranks of a pipeline
    room             the bytes that a layout holds, by kind
    pace             the time of a step: computation, exposed communication, bubble
    results          the result of a search: the layouts that fit, those that do not, and a table of them
    choice           the search
    reasons          the choice in sentences
    published        runs that others measured, as questions to the plan
    compare          the plan's errors against published runs

    found = plan.search(PRESETS["llama3-70b"], plan.CLUSTERS["H100, InfiniBand"].of(32), batch=512)
    found                                   # the best ten
    plan.explain(found)                     # the choice in sentences
    found.rejected                          # the other layouts, with reasons

Every formula is one of `labs.cost`, with its source; `plan.check("torchtitan")` compares them with measured runs.
"""

# ruff: noqa: F401

from labs.plan.candidates import layouts
from labs.plan.choice import plan, search
from labs.plan.compare import Report, check
from labs.plan.layout import Layout, Setup
from labs.plan.machines import CLUSTERS, Cluster
from labs.plan.pace import Step, seconds
from labs.plan.reasons import explain, mesh, warnings
from labs.plan.results import Found, Plan, nearest
from labs.plan.room import held
from labs.plan.sparse import SPARSE, SparseConfig, read_sparse
