"""Files: the run directory as a type, local files, and storage at a URI wrapped around it."""
