"""What is seen of requests from outside: metrics, the access log, spans, and why a request went where it went.

Brains: ``record`` (the facts of one request), ``series`` (numbers out of records), ``log_line`` (a record as a line),
``decisions`` (the last records, to be asked for), ``collector`` (the metrics page).
Shells: ``spans`` (OpenTelemetry), ``observer`` (all of these); lines go to :mod:`ems.http.access_log`.

What always holds: a request's path only writes down facts in its record; all else is made of them when it has ended, or
when somebody asks.  Labels have bounded values: a model that no engine answered for is called ``unknown``.
"""
