"""Flower: python flower_.py JOB. Its simulation on Ray with two CPUs; as many supernodes as clients a round.

Supernode k plays the k-th client of each round's cohort; the evaluation runs in the server's process.
"""

from __future__ import annotations

import sys

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from job import Job, train

FOLDER = sys.argv[1]
client, server = ClientApp(), ServerApp()
opened: dict[str, Job] = {}


def job_here() -> Job:
    """Read once in each process."""
    if not opened:
        opened[FOLDER] = Job(FOLDER)
        torch.set_num_threads(1)
    return opened[FOLDER]


@client.train()
def train_client(message: Message, context: Context) -> Message:
    job = job_here()
    model = job.model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    cohort = job.cohorts[int(message.content["config"]["server-round"]) - 1]
    x, y = job.client(cohort[int(context.node_config["partition-id"])])
    train(model, x, y, job)
    metrics = MetricRecord({"num-examples": len(y)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    job, model = job_here(), job_here().model()

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        accuracy = job.accuracy(model)
        if number:
            job.over(number, accuracy)
        return MetricRecord({"accuracy": accuracy})

    job.begun()
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=len(job.cohorts[0]))
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=job.rounds, evaluate_fn=evaluate)


if __name__ == "__main__":
    resources = {"init_args": {"num_cpus": 2}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, len(Job(FOLDER).cohorts[0]), backend_config=resources)
