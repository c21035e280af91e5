"""Values of the Host header that a rebound name could bring, and such as no client sends."""

from __future__ import annotations

ODD_HOSTS = [
    "evil.example", "evil.example:{port}", "localhost:{port}.a.com", "localhost:", "localhost..",
    "127.0.0.1.", "localhost:999999",
    "0.0.0.0:{port}", "127.0.0.2:{port}", "127.1:{port}", "2130706433:{port}", "0x7f.1:{port}", "[::]:{port}",
    "[::ffff:127.0.0.1]:{port}", "localhost:{port}:{port}", "user@localhost:{port}",
    "127.0.0.1:{port}@evil.example", "xn--localhost:{port}", "127.0.0.1:0{port}", " ", "localhost:+{port}",
    "127.0.0.1:{port},evil.example", "fleetd.local:{port}", "app.localhost:{port}", "::1:{port}", "::1",
]  # fmt: skip
