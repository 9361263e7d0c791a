"""Rules that take every coordinate by itself: the median of the clients' updates, their trimmed mean, and Bulyan."""

from __future__ import annotations

import torch
from torch import Tensor

from methods.krum import krum_scores
from methods.voters import counter, gram_of, merging_columns, refuse_fewer, squared_distances
from raysim.core.method import Method, ServerView, Value


def coordinate_median() -> Method:
    """The update is the median of the clients' updates, coordinate by coordinate.

    Yin, Chen, Ramchandran, Bartlett 2018 (ICML, arXiv:1803.01498), definition 1 and algorithm 1, option I. Of an even
    number of clients it is the mean of the middle two. Fewer than half attackers, whatever they send, cannot move a
    coordinate out of the range of the others' values. Every client counts the same, whatever its number of examples.
    Not protected from: attackers that stay within that range, which is wide where clients' data differ; buffers, which
    are averaged. The median of skewed values is not their mean, so it also differs from it without an attacker.
    Degenerate cases: clients without a step have no vote; if nobody took one, all stays.
    """
    return merging_columns("coordinate_median", _medians)


def trimmed_mean(*, trim: float = 0.1) -> Method:
    """The update is the mean of the clients' updates, coordinate by coordinate, without the largest and smallest values.

    Yin, Chen, Ramchandran, Bartlett 2018 (ICML, arXiv:1803.01498), definition 2 and algorithm 1, option II. As long as
    no more clients attack than are cut off at one end, every coordinate stays in the range of the others' values.
    Every client counts the same, whatever its number of examples.
    Not protected from: attackers that stay within that range; more of them than are cut off; buffers, which are averaged.
    Degenerate cases: trim 0 is the mean of all (`uniform`); clients without a step have no vote; if nobody took one,
    all stays.

    Args:
      trim: what is cut off at each end: a share of the clients below 0.5, rounded up to whole ones, or a whole number.
    Raises:
      ValueError: trim out of range.
      MethodError: in a round, so few clients that nobody is left.
    """
    count_of = counter("trimmed_mean", "trim", trim, below=0.5)

    def cut(server: ServerView) -> int:
        count = count_of(int(server.is_active.sum()))
        refuse_fewer(server, 2 * count + 1, f"trimmed_mean, which cuts off {count} at each end,", "trim")
        return count

    return merging_columns("trimmed_mean", _trimmed_means, cut)


def bulyan(*, attackers: float = 0.1) -> Method:
    """Krum chooses n - 2f clients one by one; of these the mean of the values nearest to the median, by coordinate.

    El Mhamdi, Guerraoui, Rouault 2018 (ICML, arXiv:1802.07927), section 4, with f of n clients attacking:
        theta = n - 2f times: the client of Krum's lowest score among those that are left joins the selection;
        each coordinate: the mean of the theta - 2f values of the selection that are nearest to its median.
    The condition is n >= 4f + 3. Krum sums over the nearest m - f - 2 of the m that are left, one at least. Every client
    counts the same.
    Not protected from: small shifts of every coordinate within the spread of the honest values; buffers, which are averaged.
    Degenerate cases: attackers 0 is the mean of all; clients without a step have no vote; if nobody took one, all stays.

    Args:
      attackers: f, a whole number, or a share below 1 of the clients of a round, rounded up to whole ones.
    Raises:
      ValueError: attackers out of range.
      MethodError: in a round, n < 4f + 3.
    """
    count_of = counter("bulyan", "attackers", attackers)

    def prepare(server: ServerView) -> tuple[Tensor, int]:
        squared = squared_distances(gram_of(server))
        count, left = count_of(len(squared)), list(range(len(squared)))
        refuse_fewer(server, 4 * count + 3, f"bulyan with {count} attackers", "attackers")
        chosen = [left.pop(int(krum_scores(squared[left][:, left], count).argmin())) for _ in left[2 * count :]]
        return torch.tensor(sorted(chosen)), len(chosen) - 2 * count

    return merging_columns("bulyan", _means_near_medians, prepare)


def _medians(block: Tensor, extra: Tensor, shared: Value) -> Tensor:
    """(width,): median of each column of (n, width), of an even n the mean of the middle two."""
    ordered, last = block.sort(dim=0).values, len(block) - 1
    return ordered[last // 2] / 2 + ordered[(last + 1) // 2] / 2  # halves first: the sum may overflow


def _trimmed_means(block: Tensor, extra: Tensor, count: int) -> Tensor:
    return block.sort(dim=0).values[count : len(block) - count].double().mean(dim=0).float()


def _means_near_medians(block: Tensor, extra: Tensor, prepared: tuple[Tensor, int]) -> Tensor:
    chosen, count = block[prepared[0]], prepared[1]
    nearest = (chosen - _medians(chosen, extra, None)).abs().argsort(dim=0, stable=True)[:count]
    return chosen.gather(0, nearest).double().mean(dim=0).float()
