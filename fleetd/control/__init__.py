"""The control schema: what the daemon answers on ``/fleet/v1/*`` and ``/v1/compress``, and fleetctl reads.

Structs only. Every field has a default and unknown fields are ignored, so that a fleetctl and a daemon of
neighbouring versions understand each other; only a struct that leaves out its defaults requires the fields
that it always sends. For the same reason a field that holds one word of a fixed set is
a plain ``str``: a newer daemon may use a word that an older fleetctl does not know. Texts, tables and units
are fleetctl's.
"""
