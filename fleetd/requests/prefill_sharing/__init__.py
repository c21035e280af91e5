"""Shared prefill from the daemon's side: the machine that answers shares a prompt, and helpers assist.

client     the machine that answers: whether a prompt is shared, with which helpers, and its run
agreement  the same machine's helpers, from the question to the end of their parts
server     a helper: it assists with its part of another machine's prompt
messages   what the two say to each other
"""
