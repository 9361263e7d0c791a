"""Numerics of a round: local training, the exact fold, evaluation. No Ray, no files, no configuration."""
