"""BlazeFL: python blazefl_.py JOB. Its FedAvg on a pool of two processes; it evaluates in the server's process."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgProcessPoolClientTrainer
from job import Job
from torch.utils.data import DataLoader, TensorDataset

opened: dict[str, Job] = {}


class Data:
    """The job as BlazeFL's partitioned dataset; a process reads it when it is first asked."""

    def __init__(self, folder: str):
        self.folder = folder

    def job(self) -> Job:
        if self.folder not in opened:
            opened[self.folder] = Job(self.folder)
        return opened[self.folder]

    def get_dataset(self, type_, cid):
        return TensorDataset(*(self.job().test if cid is None else self.job().client(cid)))

    def set_dataset(self, type_, cid, dataset):
        """Nothing of it changes."""

    def get_dataloader(self, type_, cid, batch_size, generator=None):
        size = 256 if cid is None else batch_size
        return DataLoader(self.get_dataset(type_, cid), size, shuffle=cid is not None, generator=generator)


class Models:
    def __init__(self, data: Data):
        self.data = data

    def select_model(self, model_name: str) -> torch.nn.Module:
        return self.data.job().model()


class Server(FedAvgBaseServerHandler):
    """Takes the clients of the job's cohorts."""

    def sample_clients(self):
        return self.dataset.job().cohorts[self.round]


def main() -> None:
    job = Job()
    data = Data(str(job.folder))
    share = (len(job.cohorts[0]) + 0.5) / job.num_clients
    seed, clients = 0, job.num_clients
    models = Models(data)
    server = Server(models, "model", data, job.rounds, clients, min(1.0, share), "cpu", job.batch_size, seed)
    with tempfile.TemporaryDirectory() as states:
        trainer = FedAvgProcessPoolClientTrainer(
            models, "model", Path(states), data, "cpu", clients, job.epochs, job.batch_size, job.lr, seed, 2
        )
        job.begun()
        while not server.is_stopped():
            trainer.local_process(server.downlink_package(), server.sample_clients())
            for package in trainer.uplink_package():
                server.load(package)
            job.over(server.round, server.get_summary()["server_acc"])


if __name__ == "__main__":
    main()
