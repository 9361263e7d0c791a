"""The engine on Ray: session, actors, pool, shard files. No other part of the engine imports Ray."""
