"""`raysim tune`: sweeps on Ray Tune.

Part of the composition root: `plan` lists the trials, `planner` checks them one by one, `ranges` is what values are drawn
from, `search` is a search that learns, `driver` gives the trials to Tune, `trial` is what runs in a worker, `resources`
says what a trial reserves, `outcome` reads the outcomes. `driver`, `trial`, `ranges` and `resources` are the only
places that know `ray.tune`; the engine's Ray stays in `engine/ray`, which knows nothing of configurations.

Tune gets a fixed list of trials, or asks a search for the next one when there is room, says which runs where and when, and
stops some early (ASHA, median). Nothing changes
settings in the middle of a run: configuration and seed decide its result. Each trial is a run like any other, with its
own run directory and checkpoints; Tune's own files (`<sweep>/.tune`) matter only while it runs, and a sweep that ended
early is restored by starting it again.
"""
