"""What this machine is: read without touching the accelerator, and named as people name it."""
