"""Fine-tuning: the global model after some steps on a client's own examples."""

from __future__ import annotations

from torch import Tensor

from raysim.core.method import ClientView, Count, Method, Positive


def fine_tune(*, steps: Count = 10, lr: Positive | None = None) -> Method:
    """Score the global model after fine-tuning on each client's examples; the global model trains as without this method.

    Yu, Bagdasaryan and Shmatikov 2020, "Salvaging Federated Learning by Local Adaptation" (arXiv:2002.04758).
    Fine-tuning starts at the global model that the client received and changes all parameters. It is the baseline for
    every method with personal models. `clients/personal_accuracy_*` or `clients/expected_personal_accuracy_*` are its
    results.

    Args:
      steps: local steps of fine-tuning, >= 1.
      lr: learning rate of fine-tuning, > 0; null: the client learning rate of the round.
    """

    def own_model(client: ClientView) -> Tensor:
        return client.train(client.start_state, steps=steps, lr=lr)

    return Method("fine_tune", own_model=own_model, claims=frozenset({"own-model"}))
