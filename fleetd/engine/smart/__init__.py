"""Smart prefill in a worker: scoring the tokens of a prompt, and prefilling the kept ones where they were."""
