"""A Llama's published weights, under Hugging Face's names and layout: loaded into the course's GPT, and saved from it.

    config_json   reads and writes the shape of a model
    weights       reads and writes its weights, under Hugging Face's names

A model's folder has config.json and model.safetensors.  A large model has several safetensors files, and an index that
names them.

    model = GPT(read_config(folder))
    load(model, folder)                     the whole model
    load(model, folder, slices(model))      this rank's part of a split model; `slices` comes from labs.tp
    save(model, folder)

The course's GPT and a Llama in transformers compute the same function, and rotary positions even turn the same pairs of
a head's numbers.  So no tensor has to be converted: only the names differ, and two tables translate them.  A Llama that
computes another function is refused: one with biases, say, or with another scaling of rotary positions than Llama
3.1's.

Source: the library transformers 5.23, models/llama and modeling_rope_utils.py; github.com/huggingface/safetensors.
"""

# ruff: noqa: F401

from labs.llama.config_json import read_config
from labs.llama.weights import load, names, save
