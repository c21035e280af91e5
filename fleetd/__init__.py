"""fleetd: one answer from all your unified-memory machines."""

__all__ = ["__version__"]

try:
    from fleetd._version import __version__
except ImportError:  # A tool that runs no build hook has installed it.
    from importlib.metadata import version

    __version__ = version("fleetd")
