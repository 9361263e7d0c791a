"""fluke: python fluke_.py JOB. One process with two threads: its parallel classes share clients over GPUs only."""

from __future__ import annotations

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.server import Server
from fluke.utils import FederationObserver
from job import Job

job = Job()
torch.set_num_threads(2)


class Cohorts(Server):
    """Takes the clients of the job's cohorts."""

    def get_eligible_clients(self, eligible_perc):
        return [self.clients[index] for index in job.cohorts[self.number]]


class Splitter:
    """The job's own partition."""

    num_classes = 10

    def assign(self, n_clients, batch_size):
        def loader(x, y, size, shuffle):
            return FastDataLoader(x, y, num_labels=10, batch_size=size, shuffle=shuffle, skip_singleton=False)

        clients = [loader(*job.client(index), batch_size, True) for index in range(n_clients)]
        return (clients, [None] * n_clients), loader(*job.test, 256, False)


class Lines(FederationObserver):
    accuracy = float("nan")

    def server_evaluation(self, round, eval_type, evals, **kwargs):
        self.accuracy = evals["accuracy"]

    def end_round(self, round):
        job.over(round, self.accuracy)
        Cohorts.number = round


class FedAvg(FedAVG):
    def get_server_class(self):
        return Cohorts


def main() -> None:
    FlukeENV().set_evaluator(ClassificationEval(eval_every=1, n_classes=10))
    settings = {
        "model": job.model(),
        "client": {
            "batch_size": job.batch_size,
            "local_epochs": job.epochs,
            "loss": "CrossEntropyLoss",
            "optimizer": {"name": "SGD", "lr": job.lr},
            "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1.0},
        },
        "server": {"weighted": True},
    }
    Cohorts.number = 0
    algorithm = FedAvg(job.num_clients, Splitter(), DDict(settings))
    algorithm.set_callbacks(Lines())
    job.begun()
    algorithm.run(job.rounds, len(job.cohorts[0]) / job.num_clients, finalize=False)


if __name__ == "__main__":
    main()
