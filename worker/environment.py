# SPDX-License-Identifier: Apache-2.0
"""Environment variables that a replica's process must start with.

vLLM reads them at import time or hands them to the processes it spawns, so whoever starts a
replica sets them first. This module imports nothing heavy for that reason.
"""

PLUGIN_NAME = "vtoken"


def replica_environment(*, stock: bool) -> dict[str, str]:
    """Variables for one replica; `stock` switches every vLLM plugin off.

    `VLLM_PLUGINS` is an allow-list over all of vLLM's plugin groups. Unset, it would load our
    general plugin but never our endpoint plugin: vLLM adds HTTP routes only for names it is given.
    The empty string allows nothing.
    """
    return {
        "VLLM_PLUGINS": "" if stock else PLUGIN_NAME,
        "VLLM_NO_USAGE_STATS": "1",
    }
