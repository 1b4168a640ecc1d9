"""What ``ems doctor`` looks at before anything is deployed on a host, and what it makes of it.

Here belong facts about a host, what reads them from the system (``gathering``, ``devices``, ``model_folder``), and the
brain that turns facts into findings.  Nothing in here changes anything on the host.
"""
