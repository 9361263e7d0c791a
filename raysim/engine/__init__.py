"""Engine of a run: server, trainers, pools and checkpoints. Of the engine, only `engine/ray` imports Ray."""
