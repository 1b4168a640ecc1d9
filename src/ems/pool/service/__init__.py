"""What a node does with a request, and in which order: one brain over core, tiers and tenants.

``effects`` (what is to be done to memory and files), ``handling`` (the one entry), ``storing`` (what changes slots).
"""
