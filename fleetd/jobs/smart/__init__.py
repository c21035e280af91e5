"""Smart prefill from the daemon's side: who scores a prompt, what is left of it, and who is paid."""
