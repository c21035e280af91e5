"""Identifiers that must not be mixed up."""

from __future__ import annotations

from typing import NewType

RequestId = NewType("RequestId", str)
ModelDigest = NewType("ModelDigest", str)
