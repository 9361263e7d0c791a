"""Engine of a run: server, trainers, pools and checkpoints. Only `engine/ray` imports Ray."""
