"""Who may send a request, how much, and when: keys and tokens, limits of tokens, the queue.

Brains: ``keys`` (who has which API key, or token), ``limits`` (token buckets), ``queue`` (places, and who is next).
Shells: ``shared_limits`` (Redis), ``gate`` (what a request passes), ``service`` (keeps it up to date), ``tls``
(certificates).

What always holds: a router without any of these settings admits everything and spends no time on it; a place and the
tokens that a request took are given back exactly once, however the request ends; a refusal says when to come again.
"""
