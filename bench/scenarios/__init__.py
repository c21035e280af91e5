"""What is measured: a module per scenario, with a ``measure(runs)`` that returns its rows."""
