"""The test kit that ships with EMS, for those who write a tier of their own: see :mod:`ems.testing.tiers`."""
