"""The machine's key: what is derived from it, without the library that could."""

from __future__ import annotations

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given
from hypothesis import strategies as st

from fleetd.cache import machine_key
from fleetd.cache.machine_key import KEY_BYTES, MachineKey, hkdf_sha256
from fleetd.errors import ConfigError


@given(st.binary(min_size=1, max_size=80), st.binary(max_size=80), st.binary(max_size=200))
def test_keys_are_derived_as_cryptography_does(secret: bytes, salt: bytes, info: bytes) -> None:
    expected = HKDF(SHA256(), KEY_BYTES, salt=salt, info=info).derive(secret)
    assert hkdf_sha256(secret, salt, info) == expected


def test_the_vector_of_the_rfc() -> None:
    """RFC 5869, appendix A.1, as far as the first block of output goes."""
    found = hkdf_sha256(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)))
    assert found.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_a_key_that_is_thrown_away_while_it_is_made_is_no_empty_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine_key.durable, "create", lambda path, data: None)
    with pytest.raises(ConfigError, match="thrown away"):
        MachineKey.load_or_create(tmp_path / "kv.key")
