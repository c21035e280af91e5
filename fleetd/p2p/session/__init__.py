"""The control session between two paired daemons: a sans-IO state machine, and its TLS transport."""
