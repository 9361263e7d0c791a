"""A run from start to end: records, pictures, loggers, results."""
