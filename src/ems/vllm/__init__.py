"""vLLM connectors: the pool behind a vLLM engine, registered under the names people write in ``--kv-transfer-config``.

``requests`` is the brain of the scheduler side and knows nothing of vLLM; ``scheduler`` and ``worker`` carry
between it, vLLM and the pool; ``connector`` is the class that vLLM sees.  vLLM is imported in here only.
"""
