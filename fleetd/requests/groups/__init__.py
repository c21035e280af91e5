"""Models over several machines: which machines, what they are asked for, and how long they stay."""
