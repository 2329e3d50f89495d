"""Decide how much of a verified block is committed."""
