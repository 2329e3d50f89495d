"""The only part of the worker that touches SGLang's batches, KV pools, graphs and results."""
