"""``Ems``, the SDK's entrance, and what it connects: clients, watch and the context-caching object, made together.

What always holds: a process has at most one session; after a fork the child has none, and the parent's goes on
unharmed.
"""

from __future__ import annotations

import logging
import os
import threading
import time

from ems.cc_v1.cc_config import EmsConfig
from ems.cc_v1.context_caching import ContextCaching
from ems.cc_v1.errors import EmsErrorCode, EmsException, code_of, invalid
from ems.cc_v1.monitor import Monitor
from ems.config import NodeConfig, switched_on
from ems.errors import ConfigError, EmsError
from ems.pool.client.pool_client import PoolClient
from ems.pool.node.launcher import ensure_node
from ems.transfers.pins import SegmentPins

CONNECT_SECONDS = 5.0
"""How long ``init`` waits for the node's greeting."""
CHECK_SECONDS = 2.0
"""How long a node may take to answer a health check."""
PROBE_SECONDS = 0.5
"""How long a node may take to greet when there is no session yet."""
PROBE_EVERY = 1.0
"""Between two looks at a node without a session the last answer is repeated."""
START_EVERY = 10.0
"""Least time between two attempts to start a node in the background."""

_log = logging.getLogger("ems.cc_v1")


def node_of(config: EmsConfig) -> tuple[NodeConfig, bool]:
    """The node that ``config`` means, and whether it may be started: not if ``config`` or ``EMS_AUTOSTART`` forbids it.

    Raises EmsException: EMS_INVALID_ARGUMENT, the environment's settings make no sense.
    """
    try:
        node = config.node or NodeConfig(http_port=None, autostarted=True)
        return node, switched_on("EMS_AUTOSTART", default=True) and config.autostart
    except ConfigError as error:
        raise invalid(f"the node's settings in the environment make no sense: {error}") from error


class Session:
    """A live connection, after starting a node if none runs and that is allowed.

    Raises EmsException: EMS_RECOVERD_ERROR, there is no node or it does not answer; EMS_INVALID_ARGUMENT;
    another code, the node refuses this client.
    """

    def __init__(self, config: EmsConfig) -> None:
        self.identity = config.identity()
        self._node, self._revives = node_of(config)
        if self._revives:
            _start(self._node)
        rank = config.cc_config_v1
        name = f"{rank.llm_engine} rank {rank.rank_id}"
        self._pins = SegmentPins()
        lookups = PoolClient(self._node.socket, name, credentials=config.credentials)
        pages = PoolClient(self._node.socket, name, self._pins, credentials=config.credentials)
        self._clients = (lookups, pages)
        try:
            for client in self._clients:
                client.connect(CONNECT_SECONDS)
        except EmsError as error:
            for client in self._clients:
                client.close()
            code = EmsErrorCode.EMS_RECOVERD_ERROR if error.transient else code_of(error)
            raise EmsException(str(error), code) from error
        self._started_by_engine = bool(lookups.autostarted)
        self.monitor = Monitor(config.health, config.summary_seconds, self._check, self._revive)
        self.cc = ContextCaching(config, lookups, pages, self._pins, self.monitor)
        self.monitor.start()

    def close(self) -> None:
        self.monitor.close()
        self.cc.abandon()
        for client in self._clients:
            client.close()
        self.cc.join()

    def abandon(self) -> None:
        """In a forked child: everything is the parent's, whose threads are not here."""
        self.cc.abandon()
        self._pins.abandon()
        for client in self._clients:
            client.abandon()

    def _check(self) -> None:
        failure: EmsError | None = None
        for client in self._clients:
            # Both, whatever the first one says: each notices for itself that its node was restarted, and lets go of
            # the memory of the one before.
            try:
                client.stats(CHECK_SECONDS)
                self._started_by_engine = bool(client.autostarted)
            except EmsError as error:
                failure = error
        if failure is not None:
            raise failure

    def _revive(self) -> None:
        """After a failed check: start the node again if it crashed.

        Only one that an engine started, and only where its socket is still there: a node that is stopped
        removes it.
        """
        if self._revives and self._started_by_engine and self._node.socket.exists():
            _start_quietly(self._node)


class NodeProbe:
    """Whether it is worth calling ``init``, for a process that has no session.

    When an ``init`` failed for want of a node, looking also starts one in the background: nobody else would.
    """

    def __init__(self, config: EmsConfig | None = None) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._answer = False
        self._looked = float("-inf")
        self._started = float("-inf")

    def look(self) -> bool:
        """Whether a node answers; cheap, never raises, and several callers do not wait for each other."""
        if self._lock.acquire(blocking=False):
            try:
                if time.monotonic() - self._looked >= PROBE_EVERY:
                    self._answer = self._look()
                    self._looked = time.monotonic()
            except (EmsError, OSError):
                self._answer = False
            finally:
                self._lock.release()
        return self._answer

    def _look(self) -> bool:
        node, may_start = node_of(self._config) if self._config else (NodeConfig(), False)
        given = self._config.credentials if self._config else None
        client = PoolClient(node.socket, "health check", credentials=given)
        try:
            client.connect(PROBE_SECONDS)
            return True
        except EmsError:
            if may_start and time.monotonic() - self._started >= START_EVERY:
                self._started = time.monotonic()
                threading.Thread(target=_start_quietly, args=(node,), name="ems-start", daemon=True).start()
            return False
        finally:
            client.close()


def _start(node: NodeConfig) -> None:
    try:
        if ensure_node(node):
            _log.info("EMS started a pool node on this host, its socket is %s", node.socket)
    except EmsError as error:
        raise EmsException(str(error), EmsErrorCode.EMS_RECOVERD_ERROR) from error


def _start_quietly(node: NodeConfig) -> None:
    try:
        _start(node)
    except EmsError as error:
        _log.warning("EMS could not start a pool node: %s", error)


class Ems:
    """Connects this process to the pool of its host.  Never instantiated; safe for several threads."""

    _lock = threading.Lock()
    _session: Session | None = None
    _probe = NodeProbe()

    @classmethod
    def init(cls, config: EmsConfig) -> None:
        """Connect, and start a node first if none runs.

        Again with the same configuration nothing happens; with another one the old session ends.
        Raises EmsException: EMS_RECOVERD_ERROR, the fault may pass, call again once :meth:`check_health` is true;
        EMS_INVALID_ARGUMENT, the configuration makes no sense; another code, the node refuses us.
        """
        if not isinstance(config, EmsConfig):
            raise invalid(f"config is a {type(config).__name__}, expected an EmsConfig")
        config.check()
        with cls._lock:
            if cls._session is not None:
                if cls._session.identity == config.identity():
                    return
                cls._end()
            cls._probe = NodeProbe(config)
            cls._session = Session(config)

    @classmethod
    def get_cc(cls) -> ContextCaching:
        """The context-caching object of this process.

        Raises EmsException: EMS_NOT_INITIALISED, :meth:`init` has not succeeded yet.
        """
        session = cls._session
        if session is None:
            raise EmsException(
                "Ems is not initialised in this process, call Ems.init first", EmsErrorCode.EMS_NOT_INITIALISED
            )
        return session.cc

    @classmethod
    def check_health(cls) -> bool:
        """Whether the pool is worth asking; cheap, never raises.

        The health gate's word, or where there is no session yet, whether a node answers.
        """
        session = cls._session
        return cls._probe.look() if session is None else session.monitor.healthy

    @classmethod
    def close(cls) -> None:
        """End this process's session; transfers on their way fail.  Harmless when there is none."""
        with cls._lock:
            cls._end()

    @classmethod
    def _end(cls) -> None:
        session, cls._session = cls._session, None
        if session is not None:
            session.close()

    @classmethod
    def _forked(cls) -> None:
        """In the child: the parent's threads are not here, and its sockets are not ours."""
        session, cls._session = cls._session, None
        cls._lock = threading.Lock()
        cls._probe = NodeProbe()
        if session is not None:
            session.abandon()


os.register_at_fork(after_in_child=Ems._forked)  # noqa: SLF001 - its own module
