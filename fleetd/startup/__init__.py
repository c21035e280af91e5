"""Changes to how libraries are imported, so that a process starts sooner, pauses less or takes less memory.

Each module replaces something inside a library or inside Python while imports run, and says what that saves:
medians of 20 starts with it and 20 without, in turns, on two cores with much other work.
``python -m bench.startup`` measures it again. A module that saves nothing any more is to be deleted.
"""
