"""Run as a process: how much host memory loading takes beside the model.

`python -m support.measure_loading FOLDER` writes the growth of the peak resident size in bytes.
"""

import sys
from pathlib import Path

import torch

from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import load_weights


def resident(which: str) -> int:
    """``VmRSS``, or ``VmHWM``, its highest value so far."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def main(folder: Path) -> None:
    spec = spec_from_config(checkpoint.read_config(folder))
    model = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    before = resident("VmRSS")
    if resident("VmHWM") > before + 2**20:
        raise RuntimeError("an earlier peak would hide that of loading: use a larger model")
    load_weights(model, folder)
    sys.stdout.write(f"{resident('VmHWM') - before}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
