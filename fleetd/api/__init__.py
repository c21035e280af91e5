"""HTTP: the OpenAI API and fleet control, one application for the Unix socket and localhost."""
