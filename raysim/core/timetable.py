"""Simulated time: which clients are at work, and when their updates arrive. Real time plays no part."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from raysim.core.cohorts import choose_cohort, without_dropouts
from raysim.core.method import Sampling
from raysim.core.seeding import derive_seed, numpy_generator

HOUR_S = 3600.0

#: Megabits in a byte.
MBIT = 8e-6


@dataclass(frozen=True)
class Speeds:
    """Speeds of N clients, (N,) float64 each.

    Attributes:
      step_s: seconds of a local step.
      down_mbps, up_mbps: megabits per second from and to the server.
      latency_s: seconds that a message takes in addition to its transfer.
    """

    step_s: np.ndarray
    down_mbps: np.ndarray
    up_mbps: np.ndarray
    latency_s: np.ndarray

    @property
    def sha256(self) -> str:
        """Digest of all speeds."""
        return hashlib.sha256(b"".join(column.tobytes() for column in vars(self).values())).hexdigest()

    def seconds(self, clients: np.ndarray, steps: np.ndarray, down_bytes: float, up_bytes: float) -> np.ndarray:
        """Return (K,) float64: seconds from the broadcast to the arrival of each client's update.

        Args:
          clients: (K,) int64 ids. steps: (K,) local steps.
          down_bytes, up_bytes: bytes that one client receives and sends.
        """
        transfer_s = MBIT * (down_bytes / self.down_mbps[clients] + up_bytes / self.up_mbps[clients])
        total_s: np.ndarray = 2 * self.latency_s[clients] + transfer_s + steps * self.step_s[clients]
        return total_s


class Flight(NamedTuple):
    """A client at work: time of arrival of the update, in simulated seconds, and the round of the received model."""

    end_s: float
    client: int
    begun: int


class Turn(NamedTuple):
    """The clients whose updates end a round.

    clients: (K,) int64 ids, ascending; begun: (K,) int64, the round of the model that each client received; num_late: number
    of clients with the model of this round whose updates are lost.
    """

    clients: np.ndarray
    begun: np.ndarray
    num_late: int = 0


@dataclass
class Timetable:
    """Simulated time of a run.

    Updates are ordered by simulated time, then by client, so that the same updates end a round on any machine.

    Attributes:
      seed: the run's seed.
      deadline_s: seconds after which a synchronous round ends; later updates are lost.
      over_selection: factor on the clients that begin a synchronous round; the round ends when updates fill the cohort.
      available: share of the clients that can begin, for each of the 24 hours of a day; empty: all clients, always.
      now_s: seconds since the start of the run.
      flights: clients at work in asynchronous rounds.
    """

    speeds: Speeds
    seed: int
    deadline_s: float = math.inf
    over_selection: float = 1.0
    available: Sequence[float] = ()
    now_s: float = 0.0
    flights: list[Flight] = field(default_factory=list)

    def turn(
        self,
        round_index: int,
        cohort_size: int,
        seconds_of: Callable[[np.ndarray], np.ndarray],
        *,
        arrivals: int | None = None,
        dropout: float = 0.0,
        sampling: Sampling = "fixed",
    ) -> Turn:
        """Advance `now_s` to the end of a round, and return the clients whose updates end the round.

        Args:
          cohort_size: clients of a synchronous round; clients at work in an asynchronous round.
          seconds_of: seconds_of(clients (K,)) -> (K,) seconds until the updates of clients that begin in this round arrive.
          arrivals: updates that end an asynchronous round; None: the round is synchronous.
          dropout, sampling: settings of the draw of clients that begin together, see `core.cohorts`.
        """

        def begin(count: int, arrived: Sequence[Flight] = ()) -> list[Flight]:
            free = self._free(arrived)
            count = min(count, len(free))
            if count <= 0:
                return []
            # The first draw of a round is FedAvg's cohort; each later draw of the round has its own seed.
            seed = self.seed if not arrived else derive_seed(self.seed, "begin", round_index, len(arrived))
            clients = free[choose_cohort(len(free), count, seed=seed, round_index=round_index, sampling=sampling)]
            clients = without_dropouts(clients, dropout, seed=seed, round_index=round_index)
            ends = self.now_s + seconds_of(clients)
            return [Flight(float(end), int(client), round_index) for end, client in zip(ends, clients, strict=True)]

        if arrivals is None:
            return self._waited(begin, cohort_size)
        arrived: list[Flight] = []
        while len(arrived) < arrivals:
            self.flights = [*self.flights, *begin(cohort_size - len(self.flights), arrived)]
            if not self.flights:
                self._to_next_hour()
                continue
            self.now_s = min(self.flights).end_s
            # Updates that arrive at the same time are summed before another client begins.
            due = [flight for flight in sorted(self.flights) if flight.end_s == self.now_s][: arrivals - len(arrived)]
            arrived += due
            self.flights = [flight for flight in self.flights if flight not in due]
        return _turn_of(arrived)

    def _waited(self, begin: Callable[[int], list[Flight]], cohort_size: int) -> Turn:
        """Return the clients of a synchronous round: the first `cohort_size` to arrive before the deadline."""
        self.flights = []  # an earlier asynchronous phase may have left flights
        while self.available and not len(self._free()):
            self._to_next_hour()
        begun = sorted(begin(math.ceil(self.over_selection * cohort_size - 1e-9)))
        wanted = begun[:cohort_size] if self.over_selection > 1 else begun
        arrived = [flight for flight in wanted if flight.end_s <= self.now_s + self.deadline_s]
        if len(arrived) < len(wanted):
            self.now_s += self.deadline_s
        elif arrived:
            self.now_s = arrived[-1].end_s
        return _turn_of(arrived)._replace(num_late=len(begun) - len(arrived))

    def _free(self, arrived: Sequence[Flight] = ()) -> np.ndarray:
        """Return ids of the clients that can begin now, ascending: available, not at work, and not in `arrived`."""
        is_free = np.ones(len(self.speeds.step_s), bool)
        is_free[[flight.client for flight in (*self.flights, *arrived)]] = False
        if self.available:
            day, hour = divmod(int(self.now_s // HOUR_S), 24)
            draws = numpy_generator(derive_seed(self.seed, "available", day)).random(len(is_free))
            is_free &= draws < self.available[hour]
        return np.flatnonzero(is_free)

    def _to_next_hour(self) -> None:
        self.now_s = (self.now_s // HOUR_S + 1) * HOUR_S


def _turn_of(arrived: Sequence[Flight]) -> Turn:
    ordered = sorted(arrived, key=lambda flight: flight.client)
    clients, begun = (np.array([getattr(each, name) for each in ordered], np.int64) for name in ("client", "begun"))
    return Turn(clients, begun)
