"""``python -m fleetd`` is the ``fleetd`` command."""

from fleetd.cli import main

main()
