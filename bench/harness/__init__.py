"""Daemons, fleets, cores, links and clocks: what several scenarios start and read."""
