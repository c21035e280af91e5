"""The engine: a supervised child process per loaded model, and the protocol spoken with it."""
