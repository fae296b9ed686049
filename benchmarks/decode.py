"""One decode step of every engine and peer; ``fastcar bench`` is the same. See :mod:`fastcar.bench.decode`.

    python -m benchmarks.decode [--shape W7|W05|WS] [--layers n] [--quick] [--json]

llama.cpp takes part where ``llama-cpp-python`` and ``gguf`` are installed. Build it for what any CPU of the last ten
years has, since its native build for AMX is known to crash on q8_0:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON" pip install llama-cpp-python gguf
"""

from __future__ import annotations

import sys

from fastcar.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
