"""fleetd as a service of the system: whether its installation can start, its definition, and the manager."""
