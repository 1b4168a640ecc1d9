"""What users run to measure: the pool itself, and what it gains in time to first token.

A measurement never judges: it prints what it saw and what it was compared with.  Statistics and tables are pure;
the modules that talk to servers and pools only collect samples.
"""
