"""Checks every Triton kernel on a GPU against float64 and times it beside the unfused torch form.

``python -m kernels.gpu_check [--out rows.jsonl]`` needs torch, triton and numpy only, and takes less than six minutes.
"""
