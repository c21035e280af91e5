"""This Unix process: its log, its descriptors, its service manager, its periodic tasks."""
