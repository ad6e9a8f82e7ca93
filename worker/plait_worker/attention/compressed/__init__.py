"""DeepSeek-V4's attention: a window of raw keys, and compressed entries of what lies before it."""
