"""From a configuration to a running server and trainers."""
