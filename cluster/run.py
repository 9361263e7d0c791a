"""The script that `ray submit` uploads: `ray submit CLUSTER.yaml cluster/run.py -- CONFIG [a.b=c ...]` is `raysim run`.

It runs in the home folder of the head, whose Ray and whose copy of the sources it uses: CONFIG is relative to the latter.
"""

import os
import sys
from pathlib import Path

import raysim
from raysim.__main__ import main

if __name__ == "__main__":
    os.chdir(Path(raysim.__file__).parent.parent)
    os.environ.setdefault("RAY_ADDRESS", "auto")
    sys.argv.insert(1, "run")
    main()
