"""`kvreturn bench`: the same conversations with and without read-back, side by side, on a deployment or simulated."""
