"""Transport and errors of HTTP, for every dialect. Knows no model."""
