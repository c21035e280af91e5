"""Finding other machines on the network by mDNS, and saying why one cannot be reached."""
