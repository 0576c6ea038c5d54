"""``python -m mok_cute.emulator script.py [args]``: runs a CuTe DSL script written for torch on CUDA, without a GPU.

The machine is the DSL's own choice, CUTE_DSL_ARCH, and Hopper where it is not set.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from mok_cute.errors import UnsupportedError


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m mok_cute.emulator", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="order of everything that a GPU leaves open")
    parser.add_argument("--num-sms", type=int, default=4, help="CTAs that are resident at most")
    parser.add_argument("--races", action="store_true", help="find races, missing fences and uninitialised reads")
    parser.add_argument("script", type=Path)
    parser.add_argument("args", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    if not asked.script.is_file():
        parser.error(f"{asked.script}: there is no such file")

    from mok_cute.emulator import dsl_patches, torch_on_host
    from mok_cute.emulator.virtual_device import VirtualDevice

    sys.argv = [str(asked.script), *asked.args]
    sys.path.insert(0, str(asked.script.resolve().parent))
    arch = dsl_patches.chosen_arch() or "sm_90a"
    try:
        device = VirtualDevice(arch, num_sms=asked.num_sms, seed=asked.seed, check_races=asked.races)
    except UnsupportedError as error:
        sys.exit(f"error: {error}")
    with device, torch_on_host.enter(device):
        runpy.run_path(str(asked.script), run_name="__main__")
        device.synchronize()
    for entry, statistics in device.launched:
        print(f"ran {entry}: {statistics.warp_instructions} warp-instructions", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
