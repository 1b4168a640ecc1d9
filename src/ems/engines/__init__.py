"""What vLLM and SGLang say and take over HTTP and ZeroMQ: what changes when a release of them does.  Brains.

- ``pages``: the figures and models that an engine's pages have;
- ``kv_events``: which blocks it has;
- ``usage``: the tokens of an answer;
- ``tokenize``: what an engine is asked for a prompt's token ids;
- ``first_token``: a request that is left of a client's when one token is wanted;
- ``handoff``: the fields in which engines are told how a prefill's KV reaches decode;
- ``recompute``: an answer that one engine gave up and another one goes on with.

What always holds: an engine is not trusted to say what makes sense; where no sense can be made of it, that is said.
"""
