"""The command line: verbs (`raysim run`, ...), a thin layer over `raysim.launch`."""
