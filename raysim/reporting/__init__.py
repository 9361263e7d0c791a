"""From finished runs to tables, tests and figures, with the published numbers beside them."""
