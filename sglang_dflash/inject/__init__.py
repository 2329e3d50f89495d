"""Write the target's features into the drafter's key-value cache."""
