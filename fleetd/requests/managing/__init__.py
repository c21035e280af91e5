"""Models of one machine, managed from another: the same verbs as the machine's own API has."""
