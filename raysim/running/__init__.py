"""Execution of a run: records, pictures, loggers, results."""
