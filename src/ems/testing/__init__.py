"""The test kit that ships with EMS: small models made on the spot, and real engines started and stopped.

Nothing in the product imports this package; tests, examples and people's own checks do.
"""
