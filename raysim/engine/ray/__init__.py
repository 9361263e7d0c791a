"""All of the engine's Ray: session, actors, pool, shard files. Nothing else of the engine knows that Ray exists."""
