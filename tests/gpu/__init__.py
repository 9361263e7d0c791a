"""Tests that need a real GPU; skipped elsewhere. `make test-gpu` runs them."""
