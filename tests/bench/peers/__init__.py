"""The workloads in other simulators. Each file runs alone, in an environment with that simulator and without raysim."""
