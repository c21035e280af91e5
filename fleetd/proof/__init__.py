"""Measurements that a machine's owner takes with `fleetctl doctor --prove`, in a process of their own."""
