"""Figures of methods, for reports: names in `report.figures`. Reporting finds them by name."""
