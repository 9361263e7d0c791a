"""The script that `ray submit` uploads: `ray submit CLUSTER.yaml cluster/run.py -- VERB ...` is `raysim VERB ...`.

Without a verb it is `raysim run`. It runs in the home folder of the head, whose Ray and whose copy of the sources it uses:
files are relative to the latter. Where a wheel is installed there, they are relative to the home folder, or names of recipes.
"""

import os
import sys
from pathlib import Path

import raysim
from raysim.cli.main import app, main

if __name__ == "__main__":
    sources = Path(raysim.__file__).parent.parent
    if (sources / "pyproject.toml").is_file():
        os.chdir(sources)
    os.environ.setdefault("RAY_ADDRESS", "auto")
    verbs = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    if not verbs & set(sys.argv[1:2]):
        sys.argv.insert(1, "run")
    main()
