"""What prefill and decode are sent, so that one computes the prompt's KV and the other goes on from it.

- ``kinds``: how the KV gets from one to the other, and the bodies for both;
- ``first_token``: a request that is left of a client's when one token is wanted;
- ``recompute``: an answer that one engine gave up and another one goes on with.
"""
