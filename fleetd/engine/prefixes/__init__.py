"""Where the KV cache of a prompt's beginning can be had: memory, disk, another machine. No sequences here."""
