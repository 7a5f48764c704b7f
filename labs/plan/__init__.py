"""A plan for a run: this model, on these machines, how?  Every layout that fits, the quickest first, and why.

    machines       a cluster in numbers: GPUs, memory, operations, links
    constants      what no data sheet says: which part of that a training program reaches
    fitted         those constants, fitted on published runs
    layout         who has which part of the model, of its state, of the batch
    candidates     all of those layouts, and what cannot be
    dealt          a model's layers dealt out to the ranks of a pipeline
    room           what a layout holds, by kind
    pace           how long a step takes: computation, exposed communication, bubble
    choice         the search
    reasons        the choice in sentences
    published_run  a run that others measured, as a question to the plan
    pytorch_tables   rows of their tables as such: nanotron's, torchtitan's, MosaicML's
    megatron_tables  and Megatron-LM's, Llama 3's, NVIDIA's
    published      which file is which table
    compare        how near the plan comes to them
    command        python -m labs plan

    found = plan.search(PRESETS["llama3-70b"], plan.CLUSTERS["H100, InfiniBand"].of(32), batch=512)
    found                                   # the best ten
    plan.explain(found)                     # in sentences
    found.rejected                          # and why

Every formula is one of `labs.cost`, with its source; how well they agree with the world, `plan.check(FILE.csv)` says.
"""

# ruff: noqa: F401

from labs.plan.candidates import layouts
from labs.plan.choice import Found, Plan, plan, search
from labs.plan.compare import Report, check
from labs.plan.layout import Layout, Setup
from labs.plan.machines import CLUSTERS, Cluster
from labs.plan.pace import Step, seconds
from labs.plan.reasons import explain, mesh, nearest, warnings
from labs.plan.room import held
