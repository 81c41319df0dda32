"""Frozen values, units, the ledger, the sampler and the error tree: pure Python that every other room may import."""
