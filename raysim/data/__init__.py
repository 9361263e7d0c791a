"""Image sets as Arrow files, partitions as index arrays, and per-client shards that trainers memory-map."""
