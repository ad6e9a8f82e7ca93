"""`plait launch`: a server over several nodes, by one command a node."""
