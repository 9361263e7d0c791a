"""`raysim tune`: sweeps on Ray Tune.

Part of the composition root: `plan` lists the trials, `planner` checks them one by one, `ranges` holds the ranges of
values, `search` is a search that learns, `driver` gives the trials to Tune, `trial` runs in a worker, `resources`
reserves a trial's resources, `outcome` reads the outcomes. `driver`, `trial` and `resources` are the only modules
here that import `ray.tune`; the engine's Ray stays in `engine/ray`, which imports no configuration.

Tune gets a fixed list of trials, or asks a search for the next trial when there is room. Tune places and starts trials,
and stops some early (ASHA, median). No setting changes during a run: configuration and seed decide its result. Each
trial is a run like any other, with its own run directory and checkpoints; Tune's own files (`<sweep>/.tune`) matter
only while Tune runs; a sweep that ended early resumes when it is started again.
"""
