"""KV events of engines: which blocks of which prompts they and their pools have.

``messages`` (vLLM's format) and ``source`` (the brain of one publisher) decide; ``subscriber`` carries.
"""
