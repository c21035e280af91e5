"""Changes to how libraries are imported, so that a process starts sooner, pauses less or takes less memory.

Each module replaces something inside a library or inside Python for as long as its imports run, and says what
that saves. ``python -m bench.startup`` measures it: starts with it and without it, in turns. Delete a module
that saves nothing any more.
"""
