"""What this machine says of itself, and what it knows of the others."""
