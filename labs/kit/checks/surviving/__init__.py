"""Exercises on a training that survives: what is saved, and how it goes on from there."""
