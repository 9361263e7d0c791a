"""Figures of methods, for reports: names in `report.figures`. A room above reporting, which finds them by name."""
