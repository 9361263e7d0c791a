"""Run directories, atomic writes of local files, and storage of runs at a URI."""
