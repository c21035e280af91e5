"""What survives a restart: the home folder, files that survive a crash, the database."""
