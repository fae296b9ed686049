#define FASTCAR_NAME "avx2"
#define FASTCAR_WIDTH 8
#include "kernels.inl"

const fastcar::Kernels& fastcar::avx2_kernels() { return kTable; }
