"""A machine of round figures, for times by hand."""

import shardfn as sf

TOY = sf.Hardware(
    "a toy",
    flops=2e9,
    flops32=1e9,
    memory=1e9,
    link=1e8,
    latency=1e-6,
    node=4,
    network=1e7,
    network_latency=1e-5,
)
