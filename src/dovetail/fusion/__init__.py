"""Fusion: candidates of all rules, their cost, selection, constraints, and the ledger of every decision."""
