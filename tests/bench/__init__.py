"""Benchmarks: raysim against a bare PyTorch loop, interleaved in one run."""
