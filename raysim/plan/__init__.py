"""From a configuration to something that can run."""
