"""`plait plan`: what a model takes on so many GPUs, on paper."""
