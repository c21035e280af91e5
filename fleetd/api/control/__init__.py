"""Fleet control: what fleetctl asks of the daemon, on the Unix socket only."""
