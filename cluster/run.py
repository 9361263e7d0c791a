"""The script that `ray submit` uploads: `ray submit CLUSTER.yaml cluster/run.py -- CONFIG [a.b=c ...]` is `raysim run`."""

import sys

from raysim.__main__ import main

if __name__ == "__main__":
    sys.argv.insert(1, "run")
    main()
