"""Build hook: compiles the C++ kernels into the wheel when a compiler is there.

Without a compiler, on systems other than Linux, and with PACELINE_NO_KERNELS=1 the wheel is pure Python and
the engine uses torch's operators instead. A compiler that fails is an error: a slow engine is not a surprise
to find out in production.
"""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("engine/paceline_engine/kernels")
LIBRARY = "_native.so"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    "-w",
    "-Wno-psabi",
]
# What each needs stands in csrc/support.cpp too.
X86_SETS = {
    "generic": ["-msse4.2", "-mpopcnt"],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"],
}


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        compiler, reason = find_compiler()
        if compiler is None:
            print(f"paceline: the C++ kernels are not built ({reason})", file=sys.stderr)
            return
        root = Path(self.root)
        library = compile_kernels(compiler, root / KERNELS / "csrc", root / "build" / "kernels", sets_here())
        if version == "editable":
            # Replaced, not overwritten: a running process may have the old one mapped.
            staged = root / KERNELS / f"{LIBRARY}.new.so"
            shutil.copyfile(library, staged)
            staged.replace(root / KERNELS / LIBRARY)
        else:
            build_data["force_include"][str(library)] = f"paceline_engine/kernels/{LIBRARY}"
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{tag}"
        build_data["pure_python"] = False


def find_compiler() -> tuple[str | None, str]:
    """The C++ compiler to use, or None and why there is none."""
    if os.environ.get("PACELINE_NO_KERNELS") == "1":
        return None, "PACELINE_NO_KERNELS=1"
    if not sys.platform.startswith("linux"):
        return None, f"only Linux is supported, this is {sys.platform}"
    if chosen := os.environ.get("CXX"):
        return chosen, ""
    for name in ("g++", "c++", "clang++"):
        if found := shutil.which(name):
            return found, ""
    return None, "no C++ compiler found; install g++ to have them"


def sets_here() -> dict[str, list[str]]:
    """The instruction sets of this machine's kind of processor, and the compiler's flags for each."""
    return X86_SETS if platform.machine().lower() in ("x86_64", "amd64") else {"generic": []}


def compile_kernels(compiler: str, sources: Path, folder: Path, sets: dict[str, list[str]]) -> Path:
    """Compile every instruction set and link them into one library; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    # Clang's OpenMP calls a runtime that torch does not ship; its kernels run on one thread.
    openmp = [] if "clang" in run(compiler, "--version").lower() else ["-fopenmp"]
    jobs = [
        [*FLAGS, *openmp, *flags, f"-DPK_SET={name}", str(sources / "kernels.cpp"), folder / f"{name}.o"]
        for name, flags in sets.items()
    ]
    jobs.append([*FLAGS, *openmp, str(sources / "support.cpp"), folder / "support.o"])
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: run(compiler, "-c", *map(str, job[:-1]), "-o", str(job[-1])), jobs))
    library = folder / LIBRARY
    # Without -fopenmp: the runtime is the one that torch has loaded by then, so that both share threads.
    objects = [str(job[-1]) for job in jobs]
    run(compiler, "-shared", *objects, "-o", str(library), "-Wl,--as-needed", "-static-libgcc", "-lm")
    return library


def run(*command: str) -> str:
    """Run the compiler; a failure stops the build with what it said."""
    parts = [*command[0].split(), *command[1:]]
    try:
        done = subprocess.run(parts, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(
            f"the C++ compiler {command[0]!r} could not be run ({error}): set CXX to one that works, "
            "or PACELINE_NO_KERNELS=1 to build without the kernels"
        ) from error
    if done.returncode:
        raise RuntimeError(
            f"compiling the kernels failed; PACELINE_NO_KERNELS=1 builds without them:\n"
            f"{' '.join(parts)}\n{done.stderr}"
        )
    return done.stdout
