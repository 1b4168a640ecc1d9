"""Kubeconfigs to test with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def kubeconfig(folder: Path, url: str, *, authority: str | None = None, **user: Any) -> str:
    path = folder / "config"
    path.write_text(
        json.dumps(
            {
                "current-context": "here",
                "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
                "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority": authority}}],
                "users": [{"name": "u", "user": user or {"token": "token-1"}}],
            }
        )
    )
    return str(path)
