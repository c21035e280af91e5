"""The control schema: what the daemon answers on ``/fleet/v1/*`` and ``/v1/compress``, and fleetctl reads.

Structs only; texts, tables and units are fleetctl's. A fleetctl and a daemon of neighbouring versions have to
understand each other. So readers ignore fields that they do not know, and every field has a default, but for
two kinds: what a person compares while machines pair, and what a struct that leaves out its defaults has to
send. A field that holds one word of a fixed set is a plain ``str``: a newer daemon may use another word.
"""
