"""The connection to the daemon: where its socket is, HTTP over it, and its replies as structs."""
