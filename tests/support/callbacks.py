"""A callback of Ray Tune, as a user might write one."""

from __future__ import annotations

import json

from ray import tune


class Teller(tune.Callback):
    """Writes a line for every result: the trial's labels, and its metrics."""

    def __init__(self, path: str):
        self.path = path

    def on_trial_result(self, iteration, trials, trial, result, **info):
        told = {key: value for key, value in trial.config.items() if key != "settings"}
        with open(self.path, "a") as file:
            file.write(json.dumps({**told, "server/accuracy": result["server/accuracy"]}) + "\n")
