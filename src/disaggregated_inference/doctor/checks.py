"""Every check of the doctor: why it matters and what mends it. docs/TROUBLESHOOTING.md is made of this."""

from typing import NamedTuple


class CheckKind(NamedTuple):
    title: str
    why: str
    mend: str
    between: bool = False  # between machines: only with --cluster


CHECKS: dict[str, CheckKind] = {
    "python-version": CheckKind(
        "The Python is too old, or runs under Rosetta",
        "Python 3.11 or newer is needed. On a Mac, a Python for Intel processors finds no MLX.",
        "uv python install 3.12",
    ),
    "engine-version": CheckKind(
        "An engine is missing, or has an untested version",
        "Engines keep their caches in internal structures that change between releases. An untested version may"
        " misread a KV cache, so a node refuses to start with it.",
        "pip install 'disaggregated-inference[torch]' (or mlx, llamacpp)",
    ),
    "engine-device": CheckKind(
        "The engine computes on the CPU although there is a GPU",
        "A CPU build of torch or llama.cpp works and is a hundred times slower. Nothing else shows it.",
        "Install the build for the GPU: https://pytorch.org/get-started/locally",
    ),
    "matrix-units": CheckKind(
        "The matrix units of an M5 are off",
        "On M5 chips MLX reads prompts two to four times faster with the matrix units of the GPU (neural accelerators,"
        " NAX). They need macOS 26.2, the MLX package for macOS 26, and MLX checks silently.",
        "Update to macOS 26.2 or newer, then `pip install --force-reinstall mlx mlx-metal`",
    ),
    "gpu-throttled": CheckKind(
        "The GPU is held back by heat or power",
        "A hot GPU lowers its clock. Prefill slows down by a third or more over minutes, and the router measures it"
        " late.",
        "Give the machine air, check its fans and power supply: `nvidia-smi -q -d PERFORMANCE`",
    ),
    "gpu-clock": CheckKind(
        "The GPU's clock is capped",
        "A clock limit that was set once stays until the next reset. The machine is slow and healthy.",
        "sudo nvidia-smi --reset-gpu-clocks; sudo nvidia-smi --reset-applications-clocks",
    ),
    "gpu-memory": CheckKind(
        "Another process holds GPU memory",
        "Weights and KV cache must fit beside it. The node starts with less KV memory, or not at all.",
        "End the process, or start the node with a smaller --kv-memory",
    ),
    "mac-power": CheckKind(
        "The Mac is in low power mode or throttled",
        "Low power mode halves the GPU's clock, and heat lowers it. A sleeping Mac answers nothing.",
        "sudo pmset -a lowpowermode 0 sleep 0",
    ),
    "memory": CheckKind(
        "Weights and KV cache do not fit into memory",
        "A node whose model does not fit is killed while it loads, or swaps and is a hundred times slower.",
        "Choose a smaller or quantized model, or a smaller context_window",
    ),
    "model-files": CheckKind(
        "Model files are missing or incomplete",
        "An interrupted download looks like a model until a node has loaded for minutes.",
        "Fetch the model again: `disagg cluster deploy`, or `hf download REPOSITORY`",
    ),
    "port": CheckKind(
        "Another process uses the port of a node",
        "The node cannot start, and requests reach the other program.",
        "End that process, or give the node another port in the cluster file",
    ),
    "firewall": CheckKind(
        "A firewall is on",
        "A firewall that drops packets looks like a machine that is off: requests wait until their time is up.",
        "sudo ufw allow from ADDRESS to any port 8000:8100 proto tcp",
    ),
    "clock-synchronized": CheckKind(
        "The clock is not synchronized",
        "Certificates are valid by the clock, and logs of several machines are merged by it.",
        "sudo timedatectl set-ntp true",
    ),
    "disk": CheckKind(
        "The disk is almost full",
        "Models, prefix caches and logs share it. A full disk ends deployments halfway.",
        "Remove models that are not used: `disagg models list`, `hf cache delete`",
    ),
    "leftovers": CheckKind(
        "Nodes of an earlier start still run",
        "A forgotten node holds memory, a port and an old model.",
        "End the process: `kill PID`",
    ),
    "secrets": CheckKind(
        "Others can read a token or a key",
        "Every user of the machine could use the cluster, read prompts, or admit machines.",
        "chmod 600 FILE",
    ),
    "certificate": CheckKind(
        "A certificate has expired or will soon",
        "With an expired certificate a node is refused by all others at once.",
        "disagg cluster keys rotate NAME, then `disagg cluster deploy`",
    ),
    "cluster-file": CheckKind(
        "The cluster file has faults",
        "A mistyped key is ignored, and a default is used in its place.",
        "disagg config check",
    ),
    "ssh": CheckKind(
        "A machine cannot be reached by ssh",
        "Deploying, logs and these checks need it. Nodes that run are not concerned.",
        "ssh HOST",
        True,
    ),
    "deployed": CheckKind(
        "Nothing is deployed on a machine, or other versions",
        "Without our package the doctor sees the machine only from outside. Nodes of different versions may refuse"
        " each other's KV cache.",
        "disagg cluster deploy",
        True,
    ),
    "node-answers": CheckKind(
        "A node does not answer",
        "Requests for its model go to other nodes, or fail.",
        "disagg cluster up, then `disagg cluster logs`",
        True,
    ),
    "gateway": CheckKind(
        "No prompt goes through the gateway",
        "Nodes may be well while the gateway does not reach them: it is another machine with other routes, and has its"
        " own copy of the tokens.",
        "disagg cluster status, then `disagg cluster deploy`",
        True,
    ),
    "clock-skew": CheckKind(
        "The clocks of two machines differ",
        "Certificates and signatures of one machine are not valid yet on the other. Merged logs are in the wrong"
        " order.",
        "sudo timedatectl set-ntp true (macOS: sudo sntp -sS time.apple.com)",
        True,
    ),
    "model-same": CheckKind(
        "Prefill and decode node have different models",
        "The KV cache of one model is noise in another. Nodes refuse it, and every request falls back to the decode"
        " node.",
        "Fetch the same revision on both machines, then compare: `disagg models verify`",
        True,
    ),
    "path": CheckKind(
        "No connection on a path between prefill and decode node",
        "The KV cache takes the next path, which may be slower, or does not move at all.",
        "Check cable, address and firewall: `ping ADDRESS` on the decode machine",
        True,
    ),
    "path-bandwidth": CheckKind(
        "A path is much slower than its link",
        "The KV cache of a long prompt has gigabytes. A link at a tenth of its rate costs seconds for each request. A"
        " ConnectX-7 can stay at 8 to 25 Gb/s although 200 are negotiated.",
        "Check cable, MTU and driver; for a ConnectX-7 shut the machine down, unplug its power for a minute, start it",
        True,
    ),
    "path-latency": CheckKind(
        "A path answers slowly",
        "Between machines on one cable an answer takes a tenth of a millisecond. Many milliseconds mean another route.",
        "ip route get ADDRESS (macOS: route -n get ADDRESS)",
        True,
    ),
    "path-wifi": CheckKind(
        "A path goes by Wi-Fi",
        "Wi-Fi is ten to a hundred times slower than a cable, and its rate changes.",
        "Write the address of the cable's interface into kv_addresses",
        True,
    ),
    "path-mtu": CheckKind(
        "Packets are small on a fast path",
        "With an MTU of 1500 a link of 25 Gb/s or more is limited by packets per second.",
        "sudo ip link set INTERFACE mtu 9000 on both machines, and on the switch between them",
        True,
    ),
    "path-order": CheckKind(
        "A later path is faster than the first",
        "The decode node takes the first path of kv_addresses that answers.",
        "Put the fastest address first in kv_addresses",
        True,
    ),
    "local-network": CheckKind(
        "macOS may not let the node reach other machines",
        "Since macOS 15 a background service of a user may not connect to the local network until a person allows it"
        " on the screen. It sees `No route to host`. Commands by ssh, services of the system and root are allowed.",
        "Allow it in System Settings, Privacy & Security, Local Network; or deploy the node as a system service",
        True,
    ),
}
