"""The configuration file of Kthena's router, as it stands: which plugins choose, with what weights and arguments.

As there, an unknown plugin is left out with a line in the log, ``disabled`` means nothing, a missing weight is 0, and
``random`` counts only when it is alone.  What Kthena does not have: ``models``, with a scheduler for single models.

What always holds: a file that is wrong changes nothing of what runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ems import files
from ems.errors import ConfigError
from ems.kubernetes.manifests import load_yaml
from ems.router.admission.settings import AdmissionConfig, TokenSettings
from ems.router.choosing.kthena import FILTERS, SCORES, Asked, Profile

log = logging.getLogger("ems.router")


class Plugin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A score and its weight."""

    name: str
    weight: int = 0


class Enabled(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Plugins that take part."""

    enabled: tuple[str | Plugin, ...] = ()
    disabled: tuple[str | Plugin, ...] | None = ()


class Plugins(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Filters in their order, and scores."""

    filter: Enabled = msgspec.field(default=Enabled(), name="Filter")
    score: Enabled = msgspec.field(default=Enabled(), name="Score")


class PluginConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Arguments of one plugin; those of which nothing is known here mean nothing."""

    name: str
    args: dict[str, Any] = {}


class Scheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What chooses instances."""

    plugins: Plugins = Plugins()
    plugin_config: tuple[PluginConfig, ...] = ()

    @property
    def filters(self) -> tuple[str, ...]:
        return tuple(one if isinstance(one, str) else one.name for one in self.plugins.filter.enabled)

    @property
    def scores(self) -> tuple[Plugin, ...]:
        return tuple(Plugin(one) if isinstance(one, str) else one for one in self.plugins.score.enabled)

    def unknown(self) -> Iterator[str]:
        """A line for each plugin that is left out."""
        for kind, names, known in (
            ("filter", self.filters, FILTERS),
            ("score", [one.name for one in self.scores], SCORES),
        ):
            for name in names:
                if name not in known:
                    yield f"The {kind} {name} is unknown and left out: known are {', '.join(sorted(known))}"

    def profile(self) -> Profile:
        args = {one.name: one.args for one in self.plugin_config}
        filters, scores = self.filters, self.scores
        weights = {one.name: max(one.weight, 0) for one in scores if one.name in SCORES}
        if len(weights) > 1:
            weights.pop("random", None)
        waiting = args.get("least-request", {}).get("maxWaitingRequests", 10)
        share = args.get("least-latency", {}).get("TTFTTPOTWeightFactor", 0.5)
        asked = Asked(
            max_waiting=msgspec.convert(waiting, Annotated[int, Meta(ge=0)]),
            latency_weight=msgspec.convert(share, Annotated[float, Meta(ge=0, le=1)]),
        )
        return Profile(tuple(name for name in filters if name in FILTERS), weights, asked)


class Auth(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Whose JSON Web Tokens count."""

    issuer: str = ""
    audiences: tuple[str, ...] = ()
    jwks_uri: str = ""


class RouterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All of the file."""

    scheduler: Scheduler | None = None
    auth: Auth = Auth()
    models: dict[str, Scheduler] = {}

    def schedulers(self) -> tuple[Scheduler, ...]:
        return (*((self.scheduler,) if self.scheduler is not None else ()), *self.models.values())

    def admitted(self, settings: AdmissionConfig) -> AdmissionConfig:
        """Return who is let in when it is this file that says whose tokens count."""
        if not self.auth.issuer:
            return settings
        tokens = TokenSettings(issuer=self.auth.issuer, audiences=self.auth.audiences, key_set=self.auth.jwks_uri)
        return msgspec.structs.replace(settings, tokens=tokens)


def read(path: Path) -> RouterFile:
    """Read the file.

    :raises ConfigError: it cannot be read, or something in it is wrong.
    """
    text = files.read(path, what="the router's configuration").decode("utf-8", "replace")
    documents = load_yaml(text, source=str(path))
    if len(documents) > 1:
        raise ConfigError(f"{path} has {len(documents)} YAML documents: expected one")
    try:
        file = msgspec.convert(documents[0] if documents else {}, RouterFile)
        for scheduler in file.schedulers():
            scheduler.profile()
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    return file


class Schedulers:
    """The profile by which requests for a model are placed; None where the router's own way counts."""

    def __init__(self) -> None:
        self._default: Profile | None = None
        self._of: dict[str, Profile] = {}
        self.read: frozenset[bytes] = frozenset()
        """The pages of engines that profiles go by."""

    def use(self, file: RouterFile) -> None:
        for line in dict.fromkeys(line for scheduler in file.schedulers() for line in scheduler.unknown()):
            log.warning("%s", line)
        self._default = None if file.scheduler is None else file.scheduler.profile()
        self._of = {model: scheduler.profile() for model, scheduler in file.models.items()}
        profiles = (*self._of.values(), *((self._default,) if self._default is not None else ()))
        self.read = frozenset(path for profile in profiles for path in profile.read)

    def of(self, model: str) -> Profile | None:
        return self._of.get(model, self._default)
