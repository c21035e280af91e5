"""fleetctl: the terminal client. Talks HTTP over the daemon's Unix socket and imports nothing heavy."""
