"""The verbs: a thin layer over `raysim.launch`."""
