"""What `fleetctl doctor` checks, one module per place where a cause may be."""
