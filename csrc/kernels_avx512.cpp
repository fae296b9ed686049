#define FASTCAR_NAME "avx512"
#define FASTCAR_WIDTH 16
#include "kernels.inl"

const fastcar::Kernels& fastcar::avx512_kernels() { return kTable; }
