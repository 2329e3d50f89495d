"""Stage 3: decide how much of a verified block is committed."""
