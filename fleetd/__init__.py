"""fleetd: one answer from all your unified-memory machines."""

try:
    from fleetd._version import __version__
except ImportError:  # A tool that runs no build hook has installed it.
    from importlib.metadata import version

    __version__ = version("fleetd")
