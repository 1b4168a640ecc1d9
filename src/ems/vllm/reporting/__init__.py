"""What is told of the connector's work: each request's hit or miss with its reason, counters, the summary line."""
