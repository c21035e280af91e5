"""fleetd: one answer from all your unified-memory machines."""

__version__ = "0.1.0"
