"""raysim: a federated-learning simulator for research that runs on Ray, from a laptop to a cluster."""

__version__ = "0.1.0"
