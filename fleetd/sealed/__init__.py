"""Sealed streams: bulk bytes between processes of paired machines. Knows no peers, engines or models."""
