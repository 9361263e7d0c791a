"""Seeded generators of bad configurations, damaged files and kills, and what came of each: `make fuzz`."""
