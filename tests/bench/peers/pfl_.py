"""pfl-research: torchrun --nproc-per-node 2 pfl_.py JOB. Its batches come in stored order; BatchNorm statistics stay local."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from job import Job
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import pytorch_ops
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel


class Net(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def loss(self, x, y):
        self.train()
        return F.cross_entropy(self.inner(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        self.eval()
        return {"accuracy": Weighted(int((self.inner(x).argmax(1) == y).sum()), len(y))}


class Lines(TrainingProcessCallback):
    """Comes after the evaluation in the list of callbacks."""

    def __init__(self, job):
        self.job = job

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if pytorch_ops.distributed.global_rank == 0:
            values = [
                float(v.overall_value) for k, v in aggregate_metrics if "accuracy" in str(k) and "Central" in str(k)
            ]
            self.job.over(central_iteration + 1, values[-1] if values else float("nan"))
        return False, type(aggregate_metrics)()


def main() -> None:
    job = Job()
    sizes = {client: len(job.client(client)[1]) for client in range(job.num_clients)}
    cohorts = itertools.cycle(itertools.chain.from_iterable(job.cohorts))  # pfl samples ahead
    clients = FederatedDataset(
        lambda client: Dataset(job.client(client)), lambda: next(cohorts), user_id_to_weight=sizes
    )
    module = Net(job.model())
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    if pytorch_ops.distributed.global_rank == 0:
        job.begun()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds + 1,
            train_cohort_size=len(job.cohorts[0]),
            val_cohort_size=0,
        ),
        SimulatedBackend(clients, None, postprocessors=[WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_num_epochs=job.epochs, local_learning_rate=job.lr, local_batch_size=job.batch_size),
        None,
        [CentralEvaluationCallback(Dataset(job.test), NNEvalHyperParams(local_batch_size=256)), Lines(job)],
    )


if __name__ == "__main__":
    main()
