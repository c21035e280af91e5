"""Requests: one request from admission to its last token, on this machine or with the help of others."""
