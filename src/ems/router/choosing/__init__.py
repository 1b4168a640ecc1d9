"""Which instance takes a request: brains only, without sockets and clocks; times are given."""
