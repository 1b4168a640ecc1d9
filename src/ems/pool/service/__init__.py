"""What a node does with a request, and in which order: one brain over core, tiers and tenants.

``handling`` (the one entry), ``storing`` (what changes slots, and what is done to memory and files for it).
"""
