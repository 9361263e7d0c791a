"""`python -m tests.bench.rounding`: how far one run parts from itself when its start moves by the last place of float32.

Two programs that do the same in another order of summation part as these two runs do. For each network the difference after every
round is printed as a share of how far that round moved the model. In one process, three minutes.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import torch

from raysim.data.sources import prepare
from tests.support.federations import plan_of, server_on

ROUNDS, LAST_PLACE = 7, 6e-8
LOCAL = {"lr": 0.01, "epochs": 5, "batch_size": 32}  # the defaults of FL-bench
NETWORKS = {
    "BatchNorm, ReLU, max pooling": {"norm": "batch"},
    "BatchNorm, tanh, max pooling": {"norm": "batch", "activation": "tanh"},
    "BatchNorm, ReLU, average pooling": {"norm": "batch", "pool": "average"},
    "BatchNorm, tanh, average pooling": {"norm": "batch", "activation": "tanh", "pool": "average"},
    "no norm, ReLU, max pooling": {},
}
METHODS: dict[str, list] = {"FedAvg": [], "FedAvgM": [{"fedavgm": {"beta": 0.9, "as_in": "fl-bench"}}]}


def states(root: Path, methods: list, network: dict, *, seed: int | None) -> list[torch.Tensor]:
    """The parameters before each round and after the last; with a seed, the start is moved."""
    model = {"name": "cnn", "width": 16, "hidden": 64, **network}
    server = server_on(plan_of(root, methods, model=model, local=LOCAL, rounds=ROUNDS), root)
    count = server.layout.num_params
    if seed is not None:
        noise = torch.empty(count).uniform_(-LAST_PLACE, LAST_PLACE, generator=torch.Generator().manual_seed(seed))
        server.state[:count] *= 1 + noise
    found = [server.state[:count].clone()]
    for index in range(ROUNDS):
        server.run_round(index)
        found.append(server.state[:count].clone())
    return found


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        prepare("digits", root)
        for name, methods in METHODS.items():
            for network, options in NETWORKS.items():
                still = states(root, methods, options, seed=None)
                for seed in (1, 2):
                    moved = states(root, methods, options, seed=seed)
                    sizes = [(after - before).norm() for before, after in itertools.pairwise(still)]
                    apart = [float((a - b).norm() / s) for a, b, s in zip(still[1:], moved[1:], sizes, strict=True)]
                    print(f"{name:8} {network:33} {'  '.join(f'{share:.0e}' for share in apart)}", flush=True)


if __name__ == "__main__":
    main()
