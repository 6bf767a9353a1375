"""Rooflines: what a device allows at best for the FLOPs and bytes of one call.

A call is never faster than its useful operations at the device's peak rate, nor than its necessary bytes at the
memory's. ``counts`` has the formulas by operator, ``tables`` the shapes of every kernel, ``pages`` what
is written into their READMEs, ``picture`` the drawing; see docs/kernels.md.

Source: S. Williams, A. Waterman, D. Patterson, Roofline: an insightful visual performance model for multicore
architectures, CACM 52(4), 2009.
"""

from __future__ import annotations

from kernels.roofline.model import EPYC_CORE, H200_SXM, Bound, Device, Point, Precision, Work, device_called

__all__ = ["EPYC_CORE", "H200_SXM", "Bound", "Device", "Point", "Precision", "Work", "device_called"]
