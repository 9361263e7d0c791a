"""The script that `ray submit` uploads: `ray submit CLUSTER.yaml cluster/run.py -- CONFIG [a.b=c ...]` is `raysim run`.

It runs in the home folder of the head, whose Ray and whose copy of the sources it uses: CONFIG is relative to the latter.
Where a wheel is installed there, CONFIG is relative to the home folder, or the name of a recipe.
"""

import os
import sys
from pathlib import Path

import raysim
from raysim.__main__ import main

if __name__ == "__main__":
    sources = Path(raysim.__file__).parent.parent
    if (sources / "pyproject.toml").is_file():
        os.chdir(sources)
    os.environ.setdefault("RAY_ADDRESS", "auto")
    sys.argv.insert(1, "run")
    main()
