"""Client momentum: clients send a running mean of their updates."""

from __future__ import annotations

from raysim.core.method import ClientView, Decay, Method, Update


def client_momentum(*, beta: Decay = 0.9) -> Method:
    """Send m_k = (1 - beta) u_k + beta m_k in place of the update u_k; the first time m_k = u_k.

    Karimireddy, He and Jaggi 2021, "Learning from History for Byzantine Robust Optimization" (ICML), Algorithm 2, with a local
    update in the place of a gradient. The mean over time makes honest clients similar, so that robust rules see attackers
    more clearly: list client_momentum before the attack and the rule. m_k is client memory and changes only in rounds
    in which the client takes part.

    Args:
      beta: share of the past, in [0, 1). 0 sends the update itself.
    """

    def outgoing(update: Update, client: ClientView) -> Update:
        past = client.memory.get("momentum")
        mean = update.values if past is None else past.mul_(beta).add_(update.values, alpha=1 - beta)
        client.memory["momentum"] = mean.clone()
        return update._replace(values=mean)

    return Method("client_momentum", outgoing=outgoing, needs=frozenset({"client-memory"}))
