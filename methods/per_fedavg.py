"""Per-FedAvg: a global model that is good after one gradient step."""

from __future__ import annotations

from torch import Tensor

from raysim.core.method import Batch, ClientView, GradFn, Method, Positive


def per_fedavg(*, alpha: Positive = 0.01, delta: Positive | None = None) -> Method:
    """Take local steps along the gradient of F(w - alpha * gradient of F at w).

    Fallah, Mokhtari and Ozdaglar 2020, "Personalized Federated Learning: A Meta-Learning Approach" (NeurIPS), Algorithm 1.
    A batch is cut into parts D, D' and D''; with w' = w - alpha * gradient at w on D and g the gradient at w' on D':
        first-order:   g
        hessian-free:  g - alpha * (gradient at w + delta * g - gradient at w - delta * g) / (2 * delta), on D''
    The client's own model is the global model after one step of length alpha on one batch. A batch with fewer than two
    examples per part is used whole for every part. BatchNorm's statistics follow the pass at w.

    Args:
      alpha: length of the step of adaptation, > 0.
      delta: length of the finite difference that gives the product with the Hessian, > 0; null: first-order, without
        the product. 0.001 is common.
    """

    def grads(inner: GradFn, client: ClientView) -> GradFn:
        def gradient(params: Tensor, batch: Batch) -> Tensor:
            first, second, *rest = _parts(batch, 2 if delta is None else 3)
            meta = inner(params - alpha * inner(params, first), second)
            if delta is None:
                return meta
            meta = meta.clone()  # `inner` may reuse its result
            step = delta * meta
            curvature = inner(params + step, *rest).clone() - inner(params - step, *rest)
            return meta - alpha / (2 * delta) * curvature

        return gradient

    def own_model(client: ClientView) -> Tensor:
        return client.train(client.start_state, steps=1, lr=alpha)

    return Method("per_fedavg", grads=grads, own_model=own_model, claims=frozenset({"own-model"}))


def _parts(batch: Batch, count: int) -> list[Batch]:
    """Cut a batch into parts of equal size, the first ones longer by an example where the size is not a multiple."""
    if len(batch.targets) < 2 * count:
        return [batch] * count
    return list(map(Batch, batch.inputs.tensor_split(count), batch.targets.tensor_split(count)))
