"""Pure numerics of a round: the local loop, the exact fold, evaluation. No Ray, no files, no configuration."""
