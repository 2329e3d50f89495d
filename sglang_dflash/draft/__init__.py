"""Lay out the block and fill it with the drafter's tokens."""
