"""Peers: identity, trust, sessions, sealed streams, discovery. Sans-IO below, sockets at the edge."""
