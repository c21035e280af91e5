"""The home folder: where it is, who may read it, and files in it that survive a crash."""
