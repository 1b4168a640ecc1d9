"""Every layout of KV that is served: a model, how two engines that share its blocks are run, what one without says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from tests.e2e.engines import OPTIONS, Node, Reference, connector, running, running_node
from tests.kit.engine import EngineOptions, VllmServer
from tests.kit.prepared import PreparedServer
from tests.kit.tiny_model import Size, make_model

CALL_TIMEOUT_MS = 5_000
"""Some of the tests wait until a call to a frozen node is given up."""

TWO_RANKS = ("--tensor-parallel-size", "2")


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """The model, and what its two engines do not have in common."""

    model: Size
    options: EngineOptions = msgspec.structs.replace(OPTIONS, gpu_blocks=300)
    first: tuple[str, ...] = ()
    second: tuple[str, ...] = ()
    load_async: bool | None = None
    """Whether loads are made between steps or within them; None is the default, each where it costs less.

    Only the first engine loads within steps: those of the second overlap.
    """


_LATENT = msgspec.structs.replace(OPTIONS, block_size=16, gpu_blocks=600, arguments=("--attention-backend", "CPU_MLA"))
"""In bfloat16 some in a hundred short prompts have two texts with latent attention, one where they are computed and one
where their beginning is kept: the same two with the engine's own cache as with a pool."""

LAYOUTS = {
    "grouped": Layout(model="test"),
    "mha": Layout(model="mha", load_async=True),
    "latent": Layout(model="mla", options=_LATENT, load_async=False),
    "hybrid": Layout(model="hybrid"),
}

RANKED = {
    "grouped-ranks": Layout(model="test", first=TWO_RANKS),
    "latent-ranks": Layout(model="mla", options=_LATENT, second=TWO_RANKS),
    "hybrid-ranks": Layout(model="hybrid", second=TWO_RANKS),
}
"""One engine of the pair has two ranks.  With the third engine they keep four cores busy; on fewer, calls to the node
take longer than a healthy one's, and what is found is not what is counted here."""


class Pair:
    """Two engines on one pool, and what they should say.

    Only the first keeps prefixes itself, and only the steps of the second overlap.
    """

    def __init__(
        self, layout: Layout, node: Node, servers: tuple[VllmServer, VllmServer], reference: Reference
    ) -> None:
        self.layout = layout
        self.node = node
        self.first, self.second = self.servers = servers
        self.reference = reference
        self.block = layout.options.block_size

    def wait_stored(self) -> None:
        """Return when nothing is being written to the pool."""
        self.node.wait_stored()


def release_flags(layout: Layout) -> tuple[str, ...]:
    """Flags that the release of vLLM needs to serve a model with several KV cache groups."""
    if layout.model != "hybrid":
        return ()
    from ems.vllm.compat import REPORTS_FAILED_REQUESTS

    return () if REPORTS_FAILED_REQUESTS else ("--disable-hybrid-kv-cache-manager",)


@contextmanager
def running_pair(layout: Layout, folder: Path, reference: Reference | None = None) -> Iterator[Pair]:
    """The pair on a pool of its own; ``reference`` where there is one already for this model."""
    model = make_model(folder / "model", layout.model)
    common = layout.options.arguments + release_flags(layout)
    options = msgspec.structs.replace(layout.options, arguments=common)
    plain = PreparedServer(model, log=folder / "plain.log", options=options)
    with running_node("--size", "512MB") as node:
        first, second = (
            PreparedServer(
                model,
                log=folder / f"{name}.log",
                kv_transfer_config=connector("kv_both", call_timeout_ms=CALL_TIMEOUT_MS, load_async=layout.load_async),
                options=msgspec.structs.replace(
                    options,
                    prefix_caching=name == "first",
                    async_scheduling=name == "second",
                    arguments=common + arguments,
                ),
                environment=node.environment,
            )
            for name, arguments in (("first", layout.first), ("second", layout.second))
        )
        with running(first, second, *([] if reference else [plain])):
            yield Pair(layout, node, (first, second), reference or Reference(plain.url))
