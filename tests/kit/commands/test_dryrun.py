"""Tests of python -m labs dryrun: its output for two ranks, and a sentence for each bad input.

test_dry.py compares the numbers; the sentences are written down here.
"""

import pytest

from labs.__main__ import main

RIGHT = ["dryrun", "--model", "tiny", "--mesh", "dp=8,tp=2"]
WRONG = {
    "--model llama3-9b": "model 'llama3-9b' is not known: the nearest is 'llama3-8b', of tiny, small, medium",
    "--model llama2-7b": "model 'llama2-7b' is not known: the nearest is 'llama3-8b', of tiny",
    "--mesh tp=16": "4 query heads over 2 of keys and values cannot be split over 16 ranks: use 4",
    "--ranks 12": "mesh dp=8,tp=2 has 16 ranks, not 12: change a size, or --ranks",
    "--mesh dp=8,dp=2": "mesh 'dp=8,dp=2': write each axis once, with its size, like dp=128,tp=8",
    "--mesh edp=8,ep=2": "GPT has no labs.moe.Mixture whose experts could be split: build one",
    "--model tiny-moe --mesh pp=2": "MoEGPT has a forward of its own, which no stage would call",
    "--mesh dp=8,ep=2": "no strategy has the mesh axes dp,ep: give the axes dp or replicate,shard or tp or",
    "--strategy fdsp": "strategy 'fdsp' is not known: the nearest is 'fsdp'",
    "--strategy fsdp": "fsdp has the axes dp, not dp,tp: choose a strategy with these axes, fsdp-tp, torch-fsdp-tp",
    "--node 0": "node is 0: a node has 1 rank or more, such as --node 8",
    "--node -3": "node is -3: a node has 1 rank or more, such as --node 8",
    "--rank 16": "rank 16 is not in the job: its 16 ranks are 0 to 15",
    "--mesh pp=4 --batch 6": "batch 6 is not divisible by pp=4, the number of stages",
    "--dtype int8": "dtype 'int8' is not known: the nearest is ",
    "--recompute ful": "recompute 'ful' is not known: the nearest is 'full', of none, selective",
    "--mesh dp=4000000": "ranks=4000000: even in a dry run, each group has a list of its ranks: give 1 to 1,048,576",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_bad_input_is_reported_in_a_sentence(words, capsys):
    assert main([*RIGHT, *words.split()]) == 2
    assert capsys.readouterr().err.startswith(WRONG[words])


def test_two_ranks_are_printed_side_by_side(capsys):
    assert main([*RIGHT, "--rank", "1", "15"]) == 0
    printed = capsys.readouterr().out
    assert "fsdp-tp, tiny, 1 × 64 tokens, of 16 ranks in a steady step\nassumed: AdamW; parameters" in printed
    assert (
        "rank 1 holds at its peak" in printed and "rank 15 holds at its peak" in printed and "across nodes" in printed
    )


def test_a_rank_that_sends_nothing_to_other_nodes_prints_who_may(capsys):
    assert main(["dryrun", "--model", "tiny", "--mesh", "dp=8", "--node", "4", "--strategy", "ddp-overlapped"]) == 0
    printed = capsys.readouterr().out
    assert (
        "none of it to other nodes; ranks 3, 7, … have the next one along an axis on another node, and may" in printed
    )
