"""Experts: a feed-forward of many MLPs, of which each token uses a few.

The files, in the order of reading:

    router           the experts of each token, and their weights; two ways to keep the experts' loads balanced
    mixture          tokens sorted by expert, the experts' products, and their sum at each token's place
    moe_gpt          the course's GPT with a mixture in place of each MLP, and the shapes of such models
    exchange         rows sent to the ranks of their experts, and results back, as autograd
    expert_parallel  experts split over the ranks, gradients averaged over others, the norm of all
    mixtral          published weights of Mixtral and Qwen3-MoE, under Hugging Face's names

Usage:

    model = MoEGPT(MOE_PRESETS["tiny-moe"])
    model = ExpertParallel(model, Mesh((1, 4), ("edp", "ep")))           # in a job of 4 ranks
    loss = model(x, y)

Shape suffixes, beside those of `labs.model`:

    N tokens    K experts of a token (top-k)    E experts    M rows: pairs of a token and one of its experts
"""

# ruff: noqa: F401

from labs.moe.exchange import AllToAll, ParallelExperts
from labs.moe.expert_parallel import AXES, ExpertParallel, split_experts
from labs.moe.mixtral import load_mixtral, read_mixtral, save_mixtral
from labs.moe.mixture import Experts, Mixture
from labs.moe.moe_gpt import MOE_PRESETS, MoEConfig, MoEGPT, active_parameters, dropped, parameters
from labs.moe.router import SCORES, Router, balance_biases
