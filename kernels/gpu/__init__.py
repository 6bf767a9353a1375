"""What Triton kernels share. Importing this package does not import triton; its modules do."""
