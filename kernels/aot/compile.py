"""Compile one kernel for an NVIDIA architecture; read registers, spills, shared memory, tensor-core instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.aot.case import AotCase

SHARED_BYTES_MAX = 232_448
"""Shared memory that one block may have on sm_90."""

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
_TOOL_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Resources:
    """What one compiled kernel uses.

    Args:
        regs: Registers a thread.
        spill_bytes: Spill stores and loads, bytes a thread.
        shared_bytes: Shared memory a block.
        hgmma: Warp-group tensor-core instructions in 16 bits.
        qgmma: Warp-group tensor-core instructions in FP8.
        hmma: Warp tensor-core instructions.
    """

    regs: int
    spill_bytes: int
    shared_bytes: int
    hgmma: int
    qgmma: int
    hmma: int

    def as_dict(self) -> dict[str, int]:
        """Return the fields by name."""
        return asdict(self)


def compile_case(case: AotCase, arch: int = 90) -> Resources:
    """Compile a case and read its resources with the tools that come with triton.

    Args:
        case: What to compile.
        arch: Compute capability, 90 for H100 and H200.

    Raises:
        RuntimeError: kernels are interpreted in this process, or a tool failed.
    """
    if not hasattr(case.kernel, "arg_names") or type(case.kernel).__name__ != "JITFunction":
        raise RuntimeError("kernels are interpreted in this process: unset TRITON_INTERPRET before the start")
    names = case.kernel.arg_names
    signature = {name: case.arguments.get(name, "constexpr") for name in names}
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=dict(case.constants), attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        return _read(compiled, Path(folder), arch)


def _read(compiled: Any, folder: Path, arch: int) -> Resources:
    cubin, ptx = folder / "kernel.cubin", folder / "kernel.ptx"
    cubin.write_bytes(compiled.asm["cubin"])
    ptx.write_text(compiled.asm["ptx"])
    usage = _run("cuobjdump", "--dump-resource-usage", cubin)
    code = _run("nvdisasm", "-c", cubin)
    spills = _run("ptxas", "-v", f"-arch=sm_{arch}a", ptx, "-o", folder / "again.cubin")
    registers = re.search(r"REG:(\d+)", usage)
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", spills)
    if registers is None or spilled is None:
        raise RuntimeError(f"cannot read resources in: {usage[-300:]} {spills[-300:]}")
    return Resources(
        regs=int(registers[1]),
        spill_bytes=int(spilled[1]) + int(spilled[2]),
        shared_bytes=compiled.metadata.shared,
        hgmma=code.count("HGMMA"),
        qgmma=code.count("QGMMA"),
        hmma=len(re.findall(r"\bHMMA", code)),
    )


def _run(tool: str, *arguments: str | Path) -> str:
    command = [str(_TOOLS / tool), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{tool} failed with {done.returncode}: {done.stderr[-500:]}")
    return done.stdout + done.stderr
