"""Stage 1: lay out the block and fill it with the drafter's tokens."""
