"""Weights as they are published: a Llama under Hugging Face's names and layout, into the course's GPT and back.

    config_json   the shape of the model
    weights       its numbers, under other names

A folder has config.json and model.safetensors; a large model has several such files, and an index that names them.

    model = GPT(read_config(folder))
    load(model, folder)                     the whole model
    load(model, folder, slices(model))      of a split model, this rank's part: slices is labs.tp's
    save(model, folder)

Both models compute the same, down to the numbers of a head that rotary positions turn as a pair.  So nothing has to be
converted: the same tensors have other names, and two tables say which.  A Llama that computes what this GPT cannot
(biases, another scaling of rotary positions than Llama 3.1's) is refused.

Source: the library transformers 5.23, models/llama and modeling_rope_utils.py; github.com/huggingface/safetensors.
"""

# ruff: noqa: F401

from labs.llama.config_json import read_config
from labs.llama.weights import load, names, save
