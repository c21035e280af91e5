"""Programs in processes of their own: what a scenario compares with, or drives from outside."""
