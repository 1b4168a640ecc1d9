"""An S3-compatible bucket as a place for blobs.

An object is visible when its upload is done and not before; each request is small enough for a time-out to mean
something.  Credentials come from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``) and are never
shown.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ems.errors import ConfigError, TierFailed
from ems.pool.tiers.blobs import Blob, Gone

if TYPE_CHECKING:
    from ems.pool.tiers.settings import TierConfig

RETRIES = 2
CONNECT_SECONDS = 3.0
_DELETE_MANY = 500


class BucketBlobs:
    """Blobs in the bucket and below the prefix that ``config`` names.

    Raises ConfigError: the client is not installed, or its settings make no sense.
    """

    def __init__(self, config: TierConfig) -> None:
        if find_spec("obstore") is None:
            raise ConfigError("a tier in an object store needs the package obstore: pip install 'ems-kv[s3]'")
        import obstore
        from obstore.exceptions import BaseError
        from obstore.store import S3Store

        self._obstore = obstore
        self._error = BaseError
        bucket, _, prefix = config.place.partition("/")
        settings: dict[str, Any] = {"region": config.region or os.environ.get("AWS_REGION", "us-east-1")}
        if config.endpoint:
            settings["endpoint"] = config.endpoint
        try:
            self._store = S3Store(
                bucket,
                prefix=prefix or None,
                virtual_hosted_style_request=config.style == "virtual",
                client_options={
                    "allow_http": config.endpoint.startswith("http://"),
                    "timeout": timedelta(seconds=config.timeout),
                    "connect_timeout": timedelta(seconds=min(CONNECT_SECONDS, config.timeout)),
                },
                retry_config={"max_retries": RETRIES, "retry_timeout": timedelta(seconds=config.timeout)},
                **settings,
            )
        except (BaseError, ValueError, TypeError) as error:
            raise ConfigError(f"the object store {config.name} cannot be used: {_brief(error)}") from error

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        with self._failures_named(f"cannot write {name}"):
            self._obstore.put(self._store, name, b"".join(parts), use_multipart=False)

    def read(self, name: str, offset: int, into: Sequence[memoryview]) -> int:
        wanted = sum(len(part) for part in into)
        if not wanted:
            return 0
        try:
            with self._failures_named(f"cannot read {name}"):
                found = memoryview(self._obstore.get_range(self._store, name, start=offset, length=wanted))
        except TierFailed as error:
            if _beyond_its_end(error):
                return 0
            raise
        done = 0
        for part in into:
            piece = found[done : done + len(part)]
            part[: len(piece)] = piece
            done += len(piece)
        return done

    def blobs(self) -> Iterable[Blob]:
        with self._failures_named("cannot list the bucket"):
            for some in self._obstore.list(self._store):
                for found in some:
                    yield Blob(found["path"], found["size"], found["last_modified"].timestamp())

    def move(self, name: str, new: str) -> None:
        with self._failures_named(f"cannot move {name}"):
            self._obstore.rename(self._store, name, new)

    def delete(self, names: Sequence[str]) -> None:
        for start in range(0, len(names), _DELETE_MANY):
            with self._failures_named("cannot remove objects"), contextlib.suppress(Gone):
                self._obstore.delete(self._store, list(names[start : start + _DELETE_MANY]))

    def touch(self, name: str) -> None:
        """Objects know no time of use; the catalogue does."""

    def sweep(self, older: float) -> int:  # noqa: ARG002 - the seam's signature
        return 0  # an upload that was not finished is no object

    def room(self) -> int | None:
        return None

    @contextlib.contextmanager
    def _failures_named(self, what: str) -> Iterator[None]:
        from obstore.exceptions import NotFoundError

        try:
            yield
        except (FileNotFoundError, NotFoundError) as error:
            raise Gone(what) from error
        except (self._error, OSError, ValueError) as error:
            raise TierFailed(f"{what}: {_brief(error)}") from error


_METADATA_SERVICE = "169.254.169.254"


def _brief(error: BaseException) -> str:
    """The first line of what the client says; the rest is its inner workings."""
    if _METADATA_SERVICE in str(error):  # where the keys are looked for when there are none
        return (
            "it has no credentials, expected AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the node's environment, or "
            "a role of this machine"
        )
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _beyond_its_end(error: TierFailed) -> bool:
    return "Range" in str(error) and ("416" in str(error) or "satisf" in str(error).lower())
