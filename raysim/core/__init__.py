"""The core of federated learning: method, stack, hooks, conflicts, layout, weights, seeding. No I/O, no Ray, no configuration."""
