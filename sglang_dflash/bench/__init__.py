"""`sglang-dflash bench`: what a speculative engine costs and gains on the machine at hand.

cli          the commands and their options
columns      what is compared: plain decoding, SGLang's built-in worker, ours and its variants
setup        arguments of the engines, and what a result says of the machine
compare      the measurement: correctness, then steps or held-out prompts, then the first token
correctness  the check before a time is taken
steps        time of a decode step and of a first token, on random prompts
heldout      tokens/s and acceptance on prompts that are answered to their end
figures      medians, acceptance, differing requests
tables       results as tables
profile      one decode round by stage: ranges marks the stages, trace reads the profiler's file, floor is the least
             time that reading the weights takes
products     oneDNN's matrix products against MKL's
"""
