"""Rendezvous, transports, ring collectives, and how a failure on one rank reaches every rank."""
