"""KV events of engines: which blocks of which prompts they and their pools have.

``source`` (the brain of one publisher) decides; ``subscriber`` carries.
"""
