"""How many tokens of a block are verified. Pure Python on numbers: neither CUDA nor SGLang."""
