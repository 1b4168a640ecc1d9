"""API keys for tests."""

from __future__ import annotations

import hashlib
import secrets


def new_key() -> str:
    return f"ems-{secrets.token_urlsafe(32)}"


def digest_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
