"""``Ems``: the SDK's entrance, one session a process.

What always holds: at most one session; after a fork the child has none, and the parent's goes on unharmed.
"""

from __future__ import annotations

import os
import threading

from ems.cc_v1.cc_config import EmsConfig
from ems.cc_v1.context_caching import ContextCaching
from ems.cc_v1.errors import EmsErrorCode, EmsException, invalid
from ems.cc_v1.session import NodeProbe, Session


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
            cls._probe.expect(config)
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
