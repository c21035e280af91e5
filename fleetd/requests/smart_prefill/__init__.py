"""Smart prefill from the daemon's side: shortening prompts, and scoring for others."""
