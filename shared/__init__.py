"""The words that all parts of the mesh speak; imports nothing of ours and no PyTorch."""
