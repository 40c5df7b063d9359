"""Whether llama.cpp can compute on a GPU. The doctor runs this file as a program."""

import json

from disaggregated_inference.engines.llamacpp.library import load_library


def check() -> dict[str, object]:
    library = load_library()
    return {"device": "gpu" if library.call.llama_supports_gpu_offload() else "cpu", "build": library.name}


if __name__ == "__main__":
    print(json.dumps(check()))
