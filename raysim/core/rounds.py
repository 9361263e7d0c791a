"""How people read a round: they count from 1.

Code, hooks and files have the index, from 0: progress.csv, clients.parquet, arrays, `best_round` of summary.json, what
loggers are told, TensorBoard's step. Stored runs stay comparable, and a row's number is its place in an array. What is
printed, drawn or written in a sentence has the number, one more.
"""

from __future__ import annotations


def round_name(round_index: int) -> str:
    """`round 1` for the index 0."""
    return f"round {round_index + 1}"
