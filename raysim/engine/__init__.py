"""The machinery of a run: server, trainers, pools, checkpoints and records. Ray stands in `engine/ray` only."""
