"""FFA-LoRA: A of every adapter keeps its initial value; B and the head are trained and averaged."""

from __future__ import annotations

from raysim.core.method import Method, Partition


def ffa_lora() -> Method:
    """Freezes A of every adapter, so that the average of the products is the product of the averages.

    Sun et al. 2024 (ICLR, arXiv:2403.12313). FedAvg of both factors gives (sum p_k B_k)(sum p_k A_k), which is not the
    average of what the clients learned. With one A for all clients and all rounds,
        sum_k p_k B_k A = (sum_k p_k B_k) A,
    whatever the weights p_k are. Every process derives A from the seed of the run (or reads it with `model.pretrained`), so
    it never travels: up and down go B and the head. Dropout of the adapters, momentum and weight decay work as without
    this method.
    Refused: a model without adapters, and a combination with methods that merge A and B by themselves (livar, flora).
    """

    def partition(part: Partition) -> Partition:
        fixed = {name for name in part.trained if ".lora_A." in name}
        return Partition(part.trained - fixed, part.shared - fixed, part.head)

    return Method("ffa_lora", partition=partition, needs=frozenset({"lora"}))
