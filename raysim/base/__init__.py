"""Plain helpers below everything else: errors, texts, names, options, own code, URIs. They know nothing of federated learning."""

__version__ = "0.1.0"
