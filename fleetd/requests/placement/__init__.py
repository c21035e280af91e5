"""Facts for the planner about one request, and its answer as it is shown."""
