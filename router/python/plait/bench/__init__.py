"""`plait bench`: a load generator for any OpenAI-compatible server, and what its figures mean."""
