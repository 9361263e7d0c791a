"""The machinery of a run: server, trainers, pools, checkpoints and records. Ray stands in `ray_runtime.py` only."""
