"""What the papers say about the rounds whose accuracy they print."""

from __future__ import annotations

from typing import NamedTuple


class Statement(NamedTuple):
    """The metric that a paper prints, None where it does not say; the section, and its own words."""

    metric: str | None
    section: str
    words: str


#: Paper -> what it says.
STATED = {
    "FedVG": Statement(
        "best_accuracy",
        "A.3.1",
        "While the number of training rounds is fixed at 200, model selection is performed to identify the best round and "
        "corresponding model based on performance.",
    ),
    "FLFA": Statement(
        "mean_last_10pct_accuracy",
        "10",
        "The final test accuracy reported in our main paper is the average of the accuracies from the last 10% of the total "
        "communication rounds.",
    ),
    "LIVAR": Statement(
        None, "5.1", "We report comparative results in terms of average accuracy across all evaluated methods."
    ),
    "NIID-Bench": Statement(None, "leader board", "Note that the accuracy shows the average of three experiments."),
    "UniVarFL": Statement(None, "4", "All evaluations report accuracy from a single, aggregated global model."),
}
